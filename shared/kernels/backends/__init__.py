"""Which kernels serve a device: each backend, and the registry that chooses one."""
