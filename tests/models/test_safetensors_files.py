from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from models.safetensors_files import Safetensors, TensorSpec


def test_needs_no_config(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.zeros((), dtype=torch.int64)}
    save_file(tensors, tmp_path / "weights.safetensors")
    opened = Safetensors(tmp_path)
    assert opened.names() == {"a": TensorSpec((2, 3), torch.float32), "b": TensorSpec((), torch.int64)}
    assert all(torch.equal(opened.get(name), tensor) for name, tensor in tensors.items())
    assert (opened.dtype, opened.nbytes) == (torch.float32, 6 * 4 + 8)


def test_no_floating_dtype(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="holds no tensor of a floating dtype"):
        _ = Safetensors(tmp_path).dtype


@pytest.mark.parametrize("name", ["nowhere", "file"])
def test_no_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=rf"{name} is not a folder; supported: a folder of \*\.safetensors"):
        Safetensors(tmp_path / name)
