"""dsv4dbg: a layer-by-layer numerical debugger and bisection tool for DeepSeek-V4 on ROCm."""

__version__ = "0.1.0"
