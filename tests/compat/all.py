"""Every peer with a page. A further one is a module with a `PEER` and a line here."""

from tests.compat import sglang_router, smg, vllm_router
from tests.compat.modes import Peer

PEERS: tuple[Peer, ...] = (sglang_router.PEER, smg.PEER, vllm_router.PEER)
