"""The connector as vLLM loads it. No hook waits for the daemon, and no exception leaves one: it degrades to a miss."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvmanager.clients.engine_memory import EngineMemory
from kvmanager.clients.vllm.bell import Bell
from kvmanager.clients.vllm.blocks import EngineBlocks
from kvmanager.clients.vllm.copying import Copying
from kvmanager.clients.vllm.engine_pool import Pool, engine_pool
from kvmanager.clients.vllm.handover import Offer, offer_of, params_of
from kvmanager.clients.vllm.link import Link
from kvmanager.clients.vllm.orders import Orders, Report
from kvmanager.clients.vllm.packing import Places, cpu_attention_places
from kvmanager.clients.vllm.scheduling import Scheduling
from kvmanager.clients.vllm.settings import Settings, group_table, namespace_of, revision_of
from kvmanager.clients.worker import connect_worker
from kvmanager.errors import ConfigError, InvalidArgument, LayoutMismatch
from kvmanager.layout import KVFormat, plain_format, plain_layout

F = TypeVar("F", bound=Callable[..., Any])
IDLE_S: Final = 50e-6
"""What a step without tokens leaves to other threads, where nobody rings the bell."""
IDLE_MOST_S: Final = 5e-3
"""The same where it is rung: whoever comes meanwhile waits no longer."""
_log = logging.getLogger("vllm.kvmanager")


@dataclass
class StepOrders(KVConnectorMetadata):  # type: ignore[misc]
    """One step's orders, on their way to the workers. idle: it computes nothing, and answers are waited for.

    bell: rung when one is there; None in another process than the scheduler's.
    """

    orders: Orders = field(default_factory=Orders)
    idle: bool = False
    bell: Bell | None = None


@dataclass
class StepReports(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """The workers' reports, on their way to the scheduler."""

    reports: list[Report] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReports:
        """Of two workers."""
        assert isinstance(other, StepReports)
        return StepReports([*self.reports, *other.reports])


def _harmless(otherwise: Callable[[], Any]) -> Callable[[F], F]:
    """A hook that answers `otherwise()` where it would raise: an exception in one ends the engine."""

    def wrap(hook: F) -> F:
        @functools.wraps(hook)
        def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return hook(self, *args, **kwargs)
            except Exception:
                _log.exception("%s failed; the engine goes on without the cache", hook.__name__)
                return otherwise()

        return called  # type: ignore[return-value]

    return wrap


def _nothing() -> None:
    return None


class KVManagerConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """The node's cache as a tier below the engine's own blocks, and hand-offs through it; loads are asynchronous."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._scheduling: Scheduling | None = None
        self._link: Link | None = None
        self._copying: Copying | None = None
        self._memory: EngineMemory | None = None
        self._pool: Pool | None = None
        self._tells_token_ids = False
        self._settings: Settings | None = None
        self._finished_orders: Orders | None = None
        try:
            transfer = vllm_config.kv_transfer_config
            self._settings = Settings.of(transfer.kv_connector_extra_config, str(transfer.engine_id))
            if transfer.kv_load_failure_policy != "recompute":
                raise ConfigError("set kv_load_failure_policy to 'recompute': a page that is gone must be a miss")
            if role == KVConnectorRole.SCHEDULER:
                self._begin(vllm_config, kv_cache_config)
        except Exception:
            _log.exception("the cache is off")

    def _begin(self, vllm_config: Any, kv_cache_config: Any) -> None:
        """Registers, in the background. Raises ConfigError for an engine that is not served."""
        assert self._settings is not None
        kv_format, tokens = _described(kv_cache_config)
        ranks = vllm_config.parallel_config.world_size
        model, cache = vllm_config.model_config, vllm_config.cache_config
        if cache.block_size != tokens:
            raise ConfigError(f"blocks of {tokens} tokens in the cache, of {cache.block_size} in its keys: not served")
        parts = {
            "namespace": self._settings.namespace, "dtype": model.dtype, "quantization": model.quantization,
            "cache_dtype": cache.cache_dtype, "ranks": ranks, "pages": "row by row",
        }  # fmt: skip
        name = self._settings.weights or model.model
        revision = revision_of("" if self._settings.weights else model.model, model.revision, parts)
        namespace = namespace_of(name, revision, kv_format, str(cache.prefix_caching_hash_algo), tokens)
        namespace.token_ids = self._tells_token_ids = self._settings.token_ids
        hint = group_table(self._settings, kv_format, tokens, ranks)
        fingerprint = plain_layout(kv_format, tokens).fingerprint
        self._link = Link(self._settings, namespace, fingerprint, ranks, hint)
        self._scheduling = Scheduling(self._link, tokens, ranks, self._settings.hold_s)

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is dropped is a later miss, nothing more."""
        return False

    # ---------------------------------------------------------------------------- scheduler

    @_harmless(_nothing)
    def on_new_request(self, request: Any) -> None:
        """Looks the request up, ahead of being asked."""
        if self._scheduling is not None:
            params = request.kv_transfer_params or {}
            self._scheduling.arrived(
                request.request_id, request.block_hashes, str(params.get("session_id", "")),
                export_tokens=request.num_prompt_tokens if params.get("do_remote_decode") else 0,
                tell=lambda ticket: params_of(ticket, request), offer=_offer(request),
                token_ids=request.all_token_ids if self._tells_token_ids else (),
            )  # fmt: skip

    @_harmless(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded; None while the daemon has not answered."""
        if self._scheduling is None:
            return 0, False
        found = self._scheduling.matched(request.request_id, request.num_tokens, num_computed_tokens)
        return found, bool(found)

    @_harmless(_nothing)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Leases what is to be loaded."""
        if self._scheduling is not None:
            self._scheduling.allocated(request.request_id, blocks.get_block_ids()[0], num_external_tokens)

    @_harmless(StepOrders)
    def build_connector_meta(self, scheduler_output: Any) -> StepOrders:
        """Orders for this step."""
        if self._scheduling is None:
            return StepOrders()
        state = scheduler_output.kv_connector_block_state
        orders = self._scheduling.build(
            _progress(scheduler_output), lambda request_id: state.get_block_ids(request_id)[0],
            scheduler_output.preempted_req_ids or (),
        )  # fmt: skip
        assert self._link is not None
        nothing = scheduler_output.total_num_scheduled_tokens == 0
        return StepOrders(orders, nothing and self._scheduling.waiting, self._link.bell)

    @_harmless(_nothing)
    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers did."""
        reports = connector_output.kv_connector_worker_meta
        if self._scheduling is not None and isinstance(reports, StepReports):
            self._scheduling.reported(reports.reports)

    @_harmless(lambda: (False, None))
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:  # noqa: ARG002
        """Whether the request's blocks are still needed for a save."""
        if self._scheduling is None:
            return False, None
        reason, told = request.get_finished_reason(), self._scheduling.handed_over(request.request_id)
        kept = self._scheduling.finished(request.request_id, str(reason) if reason is not None else "")
        return kept, told

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`; engines of several cache groups are not served."""
        finished: tuple[bool, dict[str, Any] | None] = self.request_finished(request, block_ids[0] if block_ids else [])
        return finished

    @_harmless(lambda: False)
    def has_pending_push_work(self) -> bool:
        """Whether the engine should go on stepping for saves of requests that ended."""
        return self._scheduling is not None and self._scheduling.busy

    # ------------------------------------------------------------------------------- worker

    @_harmless(_nothing)
    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        """The daemon's GPU memory for the engine's blocks; None: in memory of the engine's own."""
        settings = self._settings
        if settings is None or not settings.memory_group:
            return None
        kv_format, tokens = _described(self._kv_cache_config)
        self._memory, self._pool = engine_pool(
            settings, kv_format, tokens, self._vllm_config.parallel_config.world_size,
            max(tensor.size for tensor in self._kv_cache_config.kv_cache_tensors),
        )  # fmt: skip
        return self._pool.context()

    @_harmless(_nothing)
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """The engine's KV tensors."""
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        assert self._settings is not None
        settings, rank = self._settings, get_tensor_model_parallel_rank()
        self._copying = Copying(
            EngineBlocks(kv_caches, _places(next(iter(kv_caches.values())), self._backend())),
            rank,
            lambda epoch: connect_worker(settings.runtime_dir, settings.engine, epoch, rank),
        )

    def _backend(self) -> str:
        """The attention backend of the first layer."""
        layers = self._vllm_config.compilation_config.static_forward_context
        names = self._kv_cache_config.kv_cache_groups[0].layer_names
        return str(layers[names[0]].get_attn_backend().get_name())

    @_harmless(_nothing)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Begins this step's loads."""
        if self._copying is not None:
            step = self._get_connector_metadata()
            self._copying.follow(step.orders, step.bell)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads end before a request is scheduled."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are saved whole, when the step has completed them."""

    @_harmless(_nothing)
    def wait_for_save(self) -> None:
        """Does this step's saves."""
        if self._copying is not None:
            self._copying.save(self._get_connector_metadata().orders)

    @_harmless(lambda: (None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:  # noqa: ARG002
        """Requests whose blocks may go, and those that were loaded."""
        if self._copying is None:
            return self._without_copies()
        step = self._get_connector_metadata()
        if step.idle:
            # Such steps follow each other without end: the threads that bring the answers need the interpreter.
            if step.bell is None:
                time.sleep(IDLE_S)
            else:
                step.bell.wait(IDLE_MOST_S)
        return self._copying.released() or None, self._copying.received() or None

    def _without_copies(self) -> tuple[set[str] | None, set[str] | None]:
        """Where the tensors could not be served: whatever is ordered has failed at once."""
        orders = self._get_connector_metadata().orders
        return set(orders.released) or None, {load.request_id for load in orders.loads} or None

    @_harmless(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that could not be filled."""
        if self._copying is not None:
            return self._copying.lost_blocks()
        loads = self._get_connector_metadata().orders.loads
        return {block for load in loads for block in (*load.block_ids, *load.lost_block_ids)}

    @_harmless(_nothing)
    def build_connector_worker_meta(self) -> StepReports | None:
        """What this rank did."""
        report = self._copying.report() if self._copying is not None else None
        return StepReports([report]) if report is not None else None

    @_harmless(_nothing)
    def shutdown(self) -> None:
        """Leaves."""
        if self._copying is not None:
            self._copying.close()
        if self._link is not None:
            self._link.close()


def _offer(request: Any) -> Offer | None:
    """What a request brings of another engine; None for what can't be used, and then it is computed."""
    try:
        return offer_of(request.kv_transfer_params or {}, request)
    except InvalidArgument as error:
        _log.warning("request %s: %s", request.request_id, error)
        return None


def _places(tensor: Any, backend: str) -> Places | None:
    """How a backend keeps the rows of a block. Raises LayoutMismatch for one of a CPU that is not known."""
    if tensor.is_cuda or backend in ("CPU_MLA", "AMX_MLA"):
        return None
    if backend == "CPU_ATTN":
        return cpu_attention_places(int(tensor.shape[2]), int(tensor.shape[3]), tensor.dtype)
    raise LayoutMismatch(f"how the attention backend {backend} keeps the rows of a block is not known")


def _described(kv_cache_config: Any) -> tuple[KVFormat, int]:
    """The format of a page and the tokens of a block, as the workers will find them in their tensors."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise ConfigError(f"{len(groups)} KV cache groups (hybrid attention); one is served")
    spec = groups[0].kv_cache_spec
    dtype = str(spec.dtype).removeprefix("torch.")
    row = spec.unpadded_page_size_bytes // (spec.block_size * spec.num_heads)
    return plain_format(dtype, len(groups[0].layer_names), spec.num_heads, row), spec.block_size


def _progress(scheduler_output: Any) -> dict[str, int]:
    """Request -> tokens that are computed when this step is done."""
    counts, cached = scheduler_output.num_scheduled_tokens, scheduler_output.scheduled_cached_reqs
    ends = {
        request_id: computed + counts[request_id]
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    }
    for new in scheduler_output.scheduled_new_reqs:
        ends[new.req_id] = new.num_computed_tokens + counts[new.req_id]
    return ends
