"""What a compiler has to know of a chip that is not here: name or sizes, and how chips are arranged."""

import math

from msgspec import Struct

from compare.contract.ahead_of_time import Compiler
from compare.spec.experiment import ExperimentError

HOST_GPUS = 8


class Target(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A chip, as XLA's compilers name it: `tpu`, or the sizes of a GPU as in XLA's target_config/specs."""

    tpu: str = ""
    """libtpu's name: v5e."""
    description: str = ""
    compute_capability: int = 0
    core_count: int = 0
    """Streaming multiprocessors."""
    fpus_per_core: int = 0
    clock_rate_ghz: float = 0.0
    l2_cache_size: int = 0
    shared_memory_per_core: int = 0
    shared_memory_per_block_optin: int = 0
    device_memory_size: int = 0
    memory_bandwidth: int = 0

    @property
    def is_given(self) -> bool:
        """Whether there is one."""
        return bool(self.tpu or self.core_count)

    @property
    def compiler(self) -> Compiler:
        """Whose it is."""
        return "tpu" if self.tpu else "cuda"

    @property
    def text(self) -> str:
        """XLA's GpuTargetConfigProto; empty for a TPU. What is not a field is alike in all that ship."""
        if self.tpu:
            return ""
        return f"""gpu_device_info {{
          threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
          shared_memory_per_block: 49152 registers_per_core_limit: 65536 registers_per_block_limit: 65536
          shared_memory_per_core: {self.shared_memory_per_core}
          shared_memory_per_block_optin: {self.shared_memory_per_block_optin}
          core_count: {self.core_count} fpus_per_core: {self.fpus_per_core}
          memory_bandwidth: {self.memory_bandwidth} l2_cache_size: {self.l2_cache_size}
          clock_rate_ghz: {self.clock_rate_ghz} device_memory_size: {self.device_memory_size}
          cuda_compute_capability {{ major: {self.compute_capability} }} }}
        platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
        device_description_str: "{self.description}" """


def topology_of(target: Target, *, devices: int, inside: int, torus: int) -> str:
    """So many chips, as the compiler names them: v5e:16x16, v5p:4x4x4; 1x8x8 for eight hosts of eight GPUs.

    Args:
        target: the chip.
        devices: all of them.
        inside: of a host, or of a pod of TPUs.
        torus: dims of the pod's torus.

    Raises:
        ExperimentError: TPUs of several pods, or a number that is no power of two: no such slice is sold.
    """
    if not target.tpu:
        hosts = math.ceil(devices / inside)
        return f"1x{hosts}x{devices // hosts}"
    if devices > inside or devices & (devices - 1):
        raise ExperimentError(
            f"--compile: {devices} chips are no slice of a pod of {target.tpu}: give a power of two up to "
            f"{inside}"
        )
    doublings = devices.bit_length() - 1
    sides = [1 << ((doublings + dim) // torus) for dim in range(torus)]
    return f"{target.tpu}:{'x'.join(map(str, sides))}"
