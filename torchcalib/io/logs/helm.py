"""Runs of HELM: `scenario_state.json`, with `per_instance_stats.json` in the same folder."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torchcalib.io.logs.answers import Log, add_lengths, add_stated_confidence, add_token_confidences
from torchcalib.io.logs.blocks import Answer
from torchcalib.io.logs.fields import HELM, correctness, first
from torchcalib.io.logs.objects import whole_file

Key = tuple[str, int]


class Helm(Log):
    """Reader of a run. Instances with a perturbation are counted, and left out."""

    kind = "HELM run"
    names = HELM

    @classmethod
    def recognises(cls, start: Mapping[str, Any]) -> bool:
        """Return True for the keys of a scenario state."""
        return {"adapter_spec", "request_states"} <= start.keys()

    def read(self) -> Iterator[Answer]:
        """Yield one answer for each instance and trial."""
        state, stats = whole_file(self.path), self._statistics()
        separate: dict[Key, list[Mapping[str, Any]]] = defaultdict(list)
        for request in state["request_states"]:
            instance = request["instance"]
            if instance.get("perturbation"):
                self.counts["instance with a perturbation"] += 1
                continue
            key = str(instance["id"]), int(request.get("train_trial_index", 0))
            completions = (request.get("result") or {}).get("completions") or []
            if not completions:
                self.counts["request without a completion"] += 1
            elif request.get("reference_index") is None:
                yield self._generation(request, completions[0], key, stats)
            elif request.get("request_mode") == "original":
                separate[key].append(request)
        for key, requests in separate.items():
            yield self._choice(key, sorted(requests, key=lambda request: int(request["reference_index"])))

    def _generation(
        self, request: Mapping[str, Any], completion: Mapping[str, Any], key: Key, stats: Mapping[Key, float]
    ) -> Answer:
        """Return the answer whose letter or text was generated."""
        text, correct = str(completion["text"]), stats.get(key, math.nan)
        if math.isnan(correct):
            option = (request.get("output_mapping") or {}).get(text.strip(), text.strip())
            right = [_text_of(reference) for reference in request["instance"]["references"] if _is_right(reference)]
            correct = float(option in right) if right else math.nan
        answer = Answer(key[0], sample=key[1], correct=correct, text=text, short=text)
        place = f"instance {key[0]}"
        tokens = [self.log_prob(token["logprob"], place) for token in completion.get("tokens") or ()]
        add_token_confidences(answer, tokens or [self.log_prob(completion["logprob"], place)])
        add_stated_confidence(answer)
        return answer

    def _choice(self, key: Key, requests: Sequence[Mapping[str, Any]]) -> Answer:
        """Return the answer to a question whose options are separate requests."""
        scores, texts, right = [], [], []
        for k, request in enumerate(requests):
            scores.append(self.log_prob(request["result"]["completions"][0]["logprob"], f"instance {key[0]}"))
            reference = request["instance"]["references"][int(request["reference_index"])]
            texts.append(_text_of(reference))
            right += [k] if _is_right(reference) else []
        answer = Answer(key[0], sample=key[1], right=tuple(right))
        add_lengths(answer, scores, {"character": [*map(len, texts)]})
        return answer

    def _statistics(self) -> dict[Key, float]:
        """Return whether each answer is right, from the file of statistics; empty without the file."""
        path = self.path.with_name("per_instance_stats.json")
        if not path.is_file():
            return {}
        found: dict[Key, float] = {}
        for entry in whole_file(path):
            if entry.get("perturbation"):
                continue
            values = {stat["name"]["name"]: stat.get("mean") for stat in entry["stats"]}
            key = str(entry["instance_id"]), int(entry.get("train_trial_index", 0))
            found[key] = correctness(first(values, HELM["correct"]))
        return found


def _text_of(reference: Mapping[str, Any]) -> str:
    return str(reference["output"]["text"]).strip()


def _is_right(reference: Mapping[str, Any]) -> bool:
    return "correct" in reference.get("tags", ())
