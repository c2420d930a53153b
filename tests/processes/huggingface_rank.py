"""Tiny models, data and Trainers. As a script, one process of test_huggingface.py: `huggingface_rank.py FOLDER`."""

import json
import sys
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, IterableDataset
from transformers import BertConfig, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed
from transformers.models import bert as bert_models

from torchcalib.integrations.huggingface import CalibrationMetrics

N_TOKENS = 11


def bert(head, **config):
    """Return a float64 classifier with three classes: other rows in a batch change a row only by rounding."""
    set_seed(0)
    tiny = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = {**tiny, "vocab_size": N_TOKENS, "max_position_embeddings": 16, "num_labels": 3, **config}
    config = BertConfig(**config, attn_implementation="eager")
    return over_confident(getattr(bert_models.modeling_bert, f"BertFor{head}")(config))


def GPT2():
    set_seed(0)
    tiny = {"n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    return over_confident(GPT2LMHeadModel(GPT2Config(vocab_size=N_TOKENS, **tiny)))


def over_confident(model):
    """Scale the weights, so that logits are large and differ."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(30)
    return model.double().eval()


class Rows(list, Dataset):
    """A list as a data set."""


class Stream(IterableDataset):
    """An iterable data set without a length."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def sentences(n, seed=0):
    """Return rows with five tokens and a class."""
    g = torch.Generator().manual_seed(seed)
    tokens, labels = torch.randint(0, N_TOKENS, (n, 5), generator=g), torch.randint(0, 3, (n,), generator=g)
    return Rows(
        {"input_ids": row, "attention_mask": [1] * 5, "labels": label}
        for row, label in zip(tokens.tolist(), labels.tolist(), strict=True)
    )


def words(n, own=False):
    """Return sentences of 2 to 9 tokens. Most tokens have a class; with `own` the labels are the tokens."""
    g = torch.Generator().manual_seed(0)
    rows = Rows()
    for i in range(n):
        length = 2 + (i * 5) % 8
        tokens = torch.randint(0, N_TOKENS, (length,), generator=g)
        labels = tokens.clone() if own else torch.randint(0, 3, (length,), generator=g)
        labels[torch.rand(length, generator=g) < 0.3] = -100
        rows.append({"input_ids": tokens.tolist(), "attention_mask": [1] * length, "labels": labels.tolist()})
    return rows


def padded(rows):
    """Return a batch of sentences, padded to the longest."""
    fills = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {
        name: pad_sequence([torch.tensor(row[name]) for row in rows], batch_first=True, padding_value=fill)
        for name, fill in fills.items()
    }


def trainer(model, calibration, folder, words=False, eval_dataset=None, train_dataset=None, **arguments):
    """Return a Trainer with both hooks of CalibrationMetrics."""
    own = {"output_dir": str(folder), "report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    own = {**own, "per_device_eval_batch_size": 4, "dataloader_pin_memory": False, **arguments}
    hooks = {name: getattr(calibration, name) for name in ("compute_metrics", "preprocess_logits_for_metrics")}
    collator = padded if words else None
    return Trainer(model, TrainingArguments(**own), collator, train_dataset, eval_dataset, **hooks)


@torch.no_grad()
def outputs(model, rows):
    """Return logits and labels of all rows, or of all tokens of all rows. Each row is evaluated alone."""
    logits, labels = [], []
    for row in rows:
        given = {name: torch.tensor([row[name]]) for name in ("input_ids", "attention_mask")}
        logits.append(model(**given).logits.flatten(0, -2))
        label = torch.tensor([row["labels"]])
        labels.append(label if label.is_floating_point() else label.flatten())
    return torch.cat(logits), torch.cat(labels)


def main(folder):
    calibration, values = CalibrationMetrics(task="multiclass"), {}
    model, rows = bert("SequenceClassification"), sentences(13)
    for n in (1, 3, 8, 9, 13, 15):  # batches of 4 rows on each of 2 processes
        values[f"sentences {n}"] = trainer(model, calibration, folder).evaluate(sentences(n))
    for arguments in ({"batch_eval_metrics": True}, {"accelerator_config": {"split_batches": True}}):
        values[f"sentences 13 {arguments}"] = trainer(model, calibration, folder, **arguments).evaluate(rows)
    values["sentences 13 stream"] = trainer(model, calibration, folder).evaluate(Stream(rows))
    values["words 13"] = trainer(bert("TokenClassification"), calibration, folder, words=True).evaluate(words(13))
    names = [f"eval_{name}" for name in ("nll", "brier", "ecd", "ece", "accuracy")]  # without timing values
    values = {name: {metric: found[metric] for metric in names} for name, found in values.items()}
    Path(folder, f"rank{torch.distributed.get_rank()}.json").write_text(json.dumps(values))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
