"""The storm of `lab_size`, sent by two client processes that one coordinator leads."""

from typing import Any

from bench import lab_size

CLIENTS = 2


def run() -> dict[str, Any]:
    return lab_size.run(CLIENTS)
