"""Options of XLA:GPU that training frameworks set, and that XLA leaves off by default: `layout.xla = tuned`.

    latency hiding            an order in which products run between a collective's start and its end
    pipelined collectives     those of the scan over layers begin one layer earlier
    double buffering          the body of that scan twice, so that two buffers alternate
    combined collectives      up to 1 GB in a message, and for gathers and scatters divided over the devices

Sources: MaxText's and JAX-Toolbox's GPU settings; xla/debug_options_flags.cc.
"""

from compare.spec.experiment import Layout

GB = 2**30


def xla_options(layout: Layout) -> dict[str, bool | int]:
    """Options with which XLA compiles the programs of a layout; none for plain."""
    if layout.xla == "plain":
        return {}
    return {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_enable_pipelined_all_gather": True,
        "xla_gpu_enable_pipelined_all_reduce": True,
        "xla_gpu_enable_pipelined_reduce_scatter": True,
        "xla_gpu_enable_while_loop_double_buffering": True,
        "xla_gpu_all_reduce_combine_threshold_bytes": GB,
        "xla_gpu_all_gather_combine_threshold_bytes": GB // layout.devices,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": GB // (2 * layout.devices),
    }
