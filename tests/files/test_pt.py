"""`torch.save` files that are damaged or hold anything but tensors."""

import torch
from helpers.refused import assert_refused, cut, saved, text


class Anything:
    """An object that only unpickling could bring back."""


BAD = {  # what is written, what the error says, and options
    "pt: empty": (text("a.pt", ""), "must be a complete, readable pt file, got EOFError"),
    "pt: garbage": (text("a.pt", "hello" * 9), "must be a complete, readable pt file"),
    "pt: truncated": (cut(saved({"probs": torch.ones(3), "y": torch.ones(3)}), 0.6), "must be a complete, readable pt"),
    "pt: objects": (saved({"probs": Anything()}), "nothing untrusted is unpickled. Save a dict of tensors"),
    "pt: one tensor": (saved(torch.ones(3)), "must hold a dict of tensors or (preds, target[, weights]), got a Tensor"),
    "pt: four tensors": (saved([torch.ones(3)] * 4), "got a list of 4"),
    "pt: list as targets": (
        saved({"probs": torch.ones(2), "y": [0, 1]}),
        "`y` in `a.pt` must be a plain, dense tensor, got a list",
    ),
    "pt: sparse": (saved({"probs": torch.eye(2).to_sparse(), "y": torch.ones(2)}), "got a torch.sparse_coo tensor"),
    "pt: meta": (saved({"probs": torch.ones(2, device="meta"), "y": torch.ones(2)}), "tensor on meta"),
    "pt: 10^9 classes": (
        saved({"probs": torch.ones(1, 1).expand(2, 10**9), "y": torch.ones(2).long()}),
        "a tensor of more numbers than the file holds",
    ),
    "pt: tuple": (saved((torch.ones(2), torch.ones(2))), "Pass --from-logits or --from-probs"),
}


def test_bad_files_are_input_errors_in_one_line_that_say_what_to_do(tmp_path, monkeypatch):
    assert_refused(BAD, tmp_path, monkeypatch)
