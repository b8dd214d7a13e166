"""GPT-2's names of the canonical parameters: nanoGPT's and Hugging Face's, which differ in a prefix alone."""

_TOP = {
    "embedding.token": "wte.weight",
    "embedding.position": "wpe.weight",
    "norm.scale": "ln_f.weight",
    "norm.bias": "ln_f.bias",
}
_IN_BLOCK = {
    "norm1.scale": "ln_1.weight",
    "norm1.bias": "ln_1.bias",
    "attention.qkv.weight": "attn.c_attn.weight",
    "attention.qkv.bias": "attn.c_attn.bias",
    "attention.out.weight": "attn.c_proj.weight",
    "attention.out.bias": "attn.c_proj.bias",
    "norm2.scale": "ln_2.weight",
    "norm2.bias": "ln_2.bias",
    "mlp.up.weight": "mlp.c_fc.weight",
    "mlp.up.bias": "mlp.c_fc.bias",
    "mlp.down.weight": "mlp.c_proj.weight",
    "mlp.down.bias": "mlp.c_proj.bias",
}
TRANSFORMER = "transformer."
"""The prefix that a model with a head puts before each."""


def gpt2_name(name: str) -> str:
    """The name of the parameter with this canonical name, without the prefix: `h.3.mlp.c_fc.weight`."""
    if name in _TOP:
        return _TOP[name]
    _, layer, rest = name.split(".", 2)
    return f"h.{layer}.{_IN_BLOCK[rest]}"
