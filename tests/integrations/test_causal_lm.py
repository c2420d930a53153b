"""Reports of causal language models equal those of their logits, which are not written."""

import pytest
import torch
from torch import nn

import torchcalib as tc
from torchcalib.core.linear_logits import LinearLogits
from torchcalib.integrations.causal_lm import NextTokens
from torchcalib.ops.softmax_stats import rows

transformers = pytest.importorskip("transformers")

V = 50
SIZES = {"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "pad_token_id": 0}
SIZES |= {"intermediate_size": 16, "bos_token_id": 1, "eos_token_id": 1}
GPT = {"vocab_size": V, "n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 1, "eos_token_id": 1}
MODELS = {  # with what their heads have in addition to a weight
    "Llama": SIZES,
    "GPT2": GPT,  # the weight of the embedding
    "GPTJ": {**GPT, "rotary_dim": 4},  # a bias
    "Gemma2": {**SIZES, "head_dim": 8, "num_key_value_heads": 2, "final_logit_softcapping": 2.0},
    "Cohere": {**SIZES, "logit_scale": 0.3},
    "Granite": {**SIZES, "logits_scaling": 3.0},
    "OPT": {**SIZES, "word_embed_proj_dim": 8, "ffn_dim": 16},  # a projection in the body
    "Mamba": {**SIZES, "state_size": 4},
}
G = torch.Generator().manual_seed(0)


def make(name):
    """Return a model with large random parameters, so that logits differ and caps have an effect."""
    head = "LMHeadModel" if name in ("GPT2", "Bert") else "ForCausalLM"
    config = getattr(transformers, f"{name}Config")(**(MODELS.get(name) or {**SIZES, "is_decoder": True}))
    model = getattr(transformers, f"{name}{head}")(config).eval()
    for parameter in model.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=G)
    return model


def batch(n=4, length=10):
    """Return sequences with padding on both sides."""
    mask = torch.ones(n, length, dtype=torch.int64)
    mask[1, :3] = mask[2, 7:] = 0
    return {"input_ids": torch.randint(2, V, (n, length), generator=G), "attention_mask": mask}


class Logits(nn.Module):
    """The same model, but only its logits are known."""

    def __init__(self, model):
        super().__init__()
        self.inner = model

    def forward(self, input_ids, attention_mask=None):
        return self.inner(input_ids=input_ids, attention_mask=attention_mask).logits


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_statistics_are_those_of_the_logits_of_the_model(name):
    model, given = make(name), batch()
    preds, target = NextTokens(-100)(model, given)
    assert isinstance(preds, LinearLogits)
    kept = target != -100
    expected = rows(model(**given).logits[:, :-1][kept], target[kept], from_logits=True)
    for found, wanted in zip(preds[kept].rows(target[kept], "entropy", None), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_head_that_is_not_linear_uses_logits():
    model, given = make("Bert"), batch()
    preds, _ = NextTokens(-100)(model, given)
    torch.testing.assert_close(preds, model(**given).logits[:, :-1])


def test_a_report_has_the_loss_of_the_model_and_the_values_of_its_logits():
    """Labels of the prompt, and padding, are ignored. Clusters are the documents, and groups are positions."""
    model, loader = make("Gemma2"), [batch() for _ in range(3)]
    for each in loader:
        each["labels"] = each["input_ids"].masked_fill(each["attention_mask"] == 0, -100)
        each["labels"][:, :4] = -100
    options = {
        "task": "causal_lm",
        "group_by": lambda _, target: (torch.arange(target.shape[1]) // 5).expand_as(target),
        "with_calibration": False,
    }
    found, expected = (tc.evaluate(each, loader, **options) for each in (model, Logits(model)))
    losses = [model(**each).loss.item() for each in loader]
    assert found["nll"] == pytest.approx(sum(losses) / 3, rel=1e-5)
    assert found.n == expected.n == sum(int((each["labels"][:, 1:] != -100).sum()) for each in loader)
    assert found.task == "multiclass"
    assert len(found.groups) == 2
    assert any("12 independent clusters" in note for note in found.notes)
    numbers, others = found.flat(), expected.flat()
    for key in ("nll", "brier", "ecd", "accuracy", "ece/top_label", "ece/top_label/p_value", "aurc", "ace/top_label"):
        assert numbers[key] == pytest.approx(others[key], rel=1e-5), key
    assert not any("classwise" in key for key in others)


def test_without_labels_padding_does_not_count():
    given = batch()
    _, target = NextTokens(-7)(make("Llama"), given)
    tokens = given["input_ids"][:, 1:].clone()
    tokens[1, :3] = tokens[2, 6:] = -7
    assert torch.equal(target, tokens)


def test_a_report_of_hidden_states_says_that_logits_are_not_written():
    with torch.no_grad():
        preds, target = NextTokens(-100)(make("Llama"), batch())
        builder = tc.ReportBuilder(task="multiclass", from_logits=True, with_classes=False)
        builder.update(preds, target.clamp(min=0))
    assert any("logits of hidden states are not written" in note for note in builder.report().notes)


WRONG = {
    "pairs": ([(torch.ones(2, 3), torch.ones(2))], {}, ValueError, "must yield mappings with 'input_ids'"),
    "class axis": ([batch()], {"class_axis": 1}, ValueError, "`class_axis` must be None for task='causal_lm'"),
    "predict": ([batch()], {"predict": print}, ValueError, "`predict` must be None"),
    "no ignored label": ([batch()], {"ignore_index": None}, ValueError, "`ignore_index` must be an int"),
    "cluster": ([batch()], {"cluster_by": "document"}, ValueError, "`cluster_by` must be 'batch item' or"),
    "group": ([batch()], {"group_by": "topic"}, ValueError, "`group_by` must be a function or the name"),
    "labels": ([{**batch(), "labels": torch.ones(4, 3).long()}], {}, ValueError, "must return logits"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_raise(name):
    loader, options, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        tc.evaluate(make("Llama"), loader, task="causal_lm", **options)


def test_trainer_evaluates_a_model_that_returns_linear_logits(tmp_path):
    pytest.importorskip("accelerate")
    llama = make("Llama")

    class Fused(nn.Module):
        def forward(self, input_ids, attention_mask=None, labels=None):
            hidden = llama.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            return {"loss": hidden.sum(), "logits": tc.integrations.linear_logits(hidden, llama.lm_head.weight)}

    given = batch(5)
    items = [{name: x[k] for name, x in given.items()} | {"labels": given["input_ids"][k]} for k in range(5)]
    found = {}
    for name, model in (("linear", Fused()), ("written", llama)):
        calibration = tc.integrations.CalibrationMetrics(task="multiclass", shift=True)
        how = transformers.TrainingArguments(tmp_path, report_to=[], per_device_eval_batch_size=2, use_cpu=True)
        trainer = transformers.Trainer(
            model,
            how,
            eval_dataset=items,
            compute_metrics=calibration.compute_metrics,
            preprocess_logits_for_metrics=calibration.preprocess_logits_for_metrics,
        )
        found[name] = {key: value for key, value in trainer.evaluate().items() if key[5:] in calibration.metrics}
    assert len(found["written"]) == 5
    assert found["linear"] == pytest.approx(found["written"], rel=1e-5, abs=1e-6)
