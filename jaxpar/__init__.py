"""The JAX side: nanoGPT in flax.nnx, sharded by the compiler or by hand. `python -m jaxpar RUN_DIR`."""
