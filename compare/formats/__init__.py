"""Foreign formats: nanoGPT, GPT-2 and Hugging Face names, settings and token files."""
