# %% [markdown]
# # A paired experiment from a notebook
#
# Jupyter (with jupytext), VS Code and PyCharm open this file as a notebook: `# %%` begins a cell. It is also
# a script: `python docs/notebook.py`. Every engine runs in processes of its own; this one imports neither JAX
# nor PyTorch, so that the kernel stays as it is whatever they do.

# %%
import numpy as np

from compare.api import experiment, run
from compare.contract.communication import summed

# %% [markdown]
# ## Train
#
# A named experiment with a few fields of our own, on two devices that share out parameters (ZeRO-3). Without
# `engines` it would be all four that can express the layout.

# %%
tiny = experiment("check", model={"n_layer": 2, "n_embd": 16}, train={"max_iters": 5})
result = run(tiny, engines=["jax-manual", "torch-manual"], preset="fsdp", devices=2)
print(result.sentence())
assert result.passed

# %% [markdown]
# ## The ladder, rung by rung
#
# Relative errors against the first engine, in float64.

# %%
for case, errors in result.errors().items():
    for rung, error in errors.items():
        print(f"{case:15} {rung:16} {error:.1e}")

# %% [markdown]
# ## Steps are arrays

# %%
jax, torch = result["jax-manual"], result["torch-manual"]
print(np.column_stack([jax.loss, torch.loss, jax.grad_norm, jax.lr]))
print("largest difference of the losses:", np.abs(jax.loss - torch.loss).max())

# %% [markdown]
# ## Tensors have names
#
# The gradients of step 0 before clipping, by canonical parameter name, the same in both frameworks.

# %%
gradients = torch.tensors("gradients")
for name in sorted(gradients, key=lambda name: -np.abs(gradients[name]).max())[:3]:
    print(f"{name:30} {gradients[name].shape}  largest {np.abs(gradients[name]).max():.3f}")

# %% [markdown]
# ## What it cost
#
# Memory at rest by kind, for each device, and the collectives of one steady step.

# %%
for training in result:
    print(training.name, training.manifest.resident_bytes)
    for row in summed(training.record.ledger.rows):  # each row of the ledger is a place in the program
        print(f"  {row.calls:3} x {row.kind:15} along {row.axis}: {row.bytes:,} bytes {row.purpose}")
print("the whole report:", result.report)
