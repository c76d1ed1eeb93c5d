"""Every peer with a page. A further one is a module with a `PEER` and a line here."""

from tests.compat import aiperf, guidellm, litellm_proxy, prometheus, sglang_router, smg, vllm_bench, vllm_router
from tests.compat.modes import Peer

ROUTERS: tuple[Peer, ...] = (sglang_router.PEER, smg.PEER, vllm_router.PEER)
CLIENTS: tuple[Peer, ...] = (litellm_proxy.PEER, guidellm.PEER, aiperf.PEER)
"""Large, slow to start, and tried by `make compat` only."""
SCRAPERS: tuple[Peer, ...] = (prometheus.PEER,)
"""Found on PATH."""
FROM_SOURCE: tuple[Peer, ...] = (vllm_bench.PEER,)
"""What no environment of `make clients` has."""
PEERS = ROUTERS + CLIENTS + FROM_SOURCE + SCRAPERS
