"""OperatingMethods: the methods of `LLM` that measure its engine or reach into it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.config import EngineConfig
from penstock.config.vllm_methods import refuse_arguments, refuse_method
from penstock.engine.core import EngineCore
from penstock.executor.in_process import InProcessExecutor
from penstock.protocol.errors import ConfigError

if TYPE_CHECKING:
    from penstock.engine.offline_metrics import Metric, OfflineMetrics

T = TypeVar("T")


class OperatingMethods:
    config: EngineConfig
    engine: EngineCore
    _metrics: OfflineMetrics | None = None

    def __getattr__(self, name: str) -> Any:
        refuse_method(type(self).__name__, name)

    def get_metrics(self) -> list[Metric]:
        """Return the metrics' values. The names and labels are those of docs/metrics.md.

        Requires `disable_log_stats=False`: otherwise nothing is counted.
        """
        if self._metrics is None:
            raise ConfigError("get_metrics needs LLM(..., disable_log_stats=False)")
        return self._metrics.read()

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Empty the prefix cache, for example after the weights changed. Always returns True.

        Open streams continue with the blocks they have, but do not add them to the cache. There is
        no other cache for `reset_connector`.
        """
        refuse_arguments(reset_running_requests=reset_running_requests)
        self.engine.reset_prefix_cache()
        return True

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Start the torch profiler. Requires `profiler_config`. Traces' names get the prefix."""
        self.engine.start_profile(profile_prefix)

    def stop_profile(self) -> None:
        """Stop the profiler and write its trace, one file per rank."""
        self.engine.stop_profile()

    def get_world_size(self, include_dp: bool = True) -> int:
        """Return the number of ranks that compute the model."""
        return self.config.parallel.num_ranks

    def apply_model(self, func: Callable[[Any], T]) -> list[T]:
        """Call `func` with the model, a `torch.nn.Module`. Returns its result in a list.

        Only with one rank: functions are not sent to other processes.
        """
        return [func(self._worker("apply_model").model)]

    def collective_rpc(
        self,
        method: str | Callable[..., T],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[T]:
        """Call a method of the worker by name, or a function with the worker.

        Returns its result in a list. Only with one rank, in this process, so that `timeout` has no
        meaning.
        """
        worker = self._worker("collective_rpc")
        call = getattr(worker, method) if isinstance(method, str) else None
        if call is not None:
            return [call(*args, **(kwargs or {}))]
        assert callable(method)
        return [method(worker, *args, **(kwargs or {}))]

    def _worker(self, caller: str) -> Any:
        executor = self.engine.executor
        if not isinstance(executor, InProcessExecutor):
            raise ConfigError(
                f"{caller} works with one rank: no code is sent to the processes of others"
            )
        return executor.worker
