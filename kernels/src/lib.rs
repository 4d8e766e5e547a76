//! How to compute a model: the scalar oracle, the CPU kernels and the executor.
