"""A vLLM engine as a client: `kv_connector="KVManagerConnector"`, `kv_connector_module_path="kvmanager.clients.vllm"`.

Only `connector` needs vLLM; it is imported when the class is asked for.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "KVManagerConnector":
        from kvmanager.clients.vllm.connector import KVManagerConnector

        return KVManagerConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
