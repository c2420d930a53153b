"""`.safetensors` files that are damaged, or of a dtype that is no prediction."""

import torch
from helpers.refused import assert_refused, cut, text
from safetensors.torch import save_file


def tensors(**values):
    def write(folder):
        save_file(values, folder / "a.safetensors")
        return ["a.safetensors"]

    return write


BAD = {  # what is written, what the error says, and options
    "safetensors: garbage": (
        text("a.safetensors", "hello" * 9),
        "readable safetensors file, got ValueError: a header of",
    ),
    "safetensors: truncated": (cut(tensors(probs=torch.ones(9), y=torch.ones(9)), 0.8), "got SafetensorError"),
    "safetensors: float8": (
        tensors(probs=torch.ones(3).to(torch.float8_e4m3fn), y=torch.ones(3)),
        "floating-point predictions, got F8_E4M3",
    ),
}


def test_bad_files_are_input_errors_in_one_line_that_say_what_to_do(tmp_path, monkeypatch):
    assert_refused(BAD, tmp_path, monkeypatch)
