"""The CPU's tuned kernels: C++ with AVX-512, compiled once for the machine and called through ctypes."""
