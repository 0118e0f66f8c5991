"""From a Hugging Face checkpoint to an adapted `nn.Module` and its cache plan."""
