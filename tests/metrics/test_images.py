"""Values per image: means, tables, tests and intervals, against loops over images."""

import math
from functools import partial

import pytest
import torch
from oracles import images as slow

import torchcalib as tc
import torchcalib.functional as F
from torchcalib.core import pieces

METRICS = {
    "ece": tc.ECE, "esce": tc.ESCE, "mce": tc.MCE, "rmsce": tc.RMSCE, "mean_bin_error": tc.MeanBinError,
    "nll": tc.NLL, "brier_score": tc.BrierScore,
}  # fmt: skip
N_CLASSES = 3
SHAPE = (5, 4)


def volumes(n=7, seed=0):
    """Return class-first probabilities and labels. Class 2 is absent in image 1, and image 3 has one class only."""
    generator = torch.Generator().manual_seed(seed)
    preds = (2 * torch.randn(n, N_CLASSES, *SHAPE, generator=generator, dtype=torch.float64)).softmax(1)
    target = torch.randint(0, N_CLASSES, (n, *SHAPE), generator=generator)
    target[1] = target[1].clamp(max=1)
    target[3] = 0
    return preds, target


def voxels(preds, target, weights=None):
    """Return the voxels of each image for the loops."""
    one_hot = target if target.shape == preds.shape else torch.nn.functional.one_hot(target, N_CLASSES).movedim(-1, 1)
    weights = torch.ones(len(preds), *SHAPE) if weights is None else weights
    columns = [x.flatten(2).movedim(1, -1).tolist() for x in (preds, one_hot.double())]
    every = zip(*columns, weights.double().flatten(1).tolist(), strict=True)
    return [list(zip(*image, strict=True)) for image in every]


def close(value, expected):
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(value.double(), expected, rtol=1e-12, atol=1e-12, equal_nan=True)


def streamed(cls, batches, **options):
    metric = cls(**options)
    for batch in batches:
        metric.update(*batch)
    return metric


def in_batches(*columns, size=3):
    """Yield batches of images; the last one is smaller."""
    for start in range(0, len(columns[0]), size):
        yield tuple(column[start : start + size] for column in columns)


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("given", ["all", "mask", "weights", "label"])
def test_one_value_per_image(name, given):
    """The mean over images is that of loops, for functions and streams, with ignored voxels and an image of them."""
    preds, target = volumes()
    generator = torch.Generator().manual_seed(1)
    weights, options = None, {}
    if given == "mask":
        weights = torch.rand(target.shape, generator=generator) < 0.6
        weights[2] = False  # an image without voxels does not count
    elif given == "weights":
        weights = torch.rand(target.shape, generator=generator, dtype=torch.float64)
    used = torch.ones(target.shape) if weights is None else weights
    labels = target
    if given == "label":
        hidden = torch.rand(target.shape, generator=generator) < 0.3
        hidden[4] = True
        labels, used, options = target.masked_fill(hidden, 255), ~hidden, {"ignore_index": 255}
    images = voxels(preds, target, used)
    values = [slow.value_of(name, image) for image in images]
    columns = (preds, labels) if weights is None else (preds, labels, weights)
    close(getattr(F, name)(*columns[:2], weights=weights, per_image=True, **options), slow.mean(values))
    metric = streamed(METRICS[name], in_batches(*columns), num_classes=N_CLASSES, per_image=True, **options)
    close(metric.compute(), slow.mean(values))
    close(metric.cases().value, values)
    close(metric.cases().pooled, slow.value_of(name, [voxel for image in images for voxel in image]))
    close(metric.cases().n, [sum(w for _, _, w in image) for image in images])


@pytest.mark.parametrize("given", ["label", "mask", "label and mask"])
@pytest.mark.parametrize("task", ["multiclass", "binary"])
def test_ignored_voxels_of_large_images_have_any_values(task, given):
    """Large images are added without removing voxels, whose values may be invalid. Other invalid values raise."""
    generator = torch.Generator().manual_seed(0)
    preds = torch.randn(2, 3, 30, 20, generator=generator).softmax(1)
    target = torch.randint(0, 3, (2, 30, 20), generator=generator)
    options = {"num_classes": 3, "mode": "classwise"}
    if task == "binary":
        preds, target, options = preds[:, 1], target.clamp(max=1), {"task": "binary"}
    hidden = torch.rand(target.shape, generator=generator) < 0.2
    hidden[0, 5:] = hidden[0, 5:] | (given == "mask")
    expected = [
        tc.ece(p.movedim(0, -1)[~h] if task != "binary" else p[~h], y[~h], **options)
        for p, y, h in zip(preds.double(), target, hidden, strict=True)
    ]
    shown = hidden if task == "binary" else hidden.unsqueeze(1).expand(preds.shape)
    preds = preds.masked_fill(shown, torch.nan)
    columns = {}
    if "label" in given:
        target, options = target.masked_fill(hidden, 255), options | {"ignore_index": 255}
    if "mask" in given:
        columns = {"weights": ~hidden}
    metric = tc.ECE(per_image=True, **options)
    metric.update(preds, target, **columns)
    value = sum(map(float, expected)) / 2
    assert float(metric.compute()) == pytest.approx(value, abs=1e-6)
    assert float(tc.ece(preds, target, per_image=True, **options, **columns)) == pytest.approx(value, abs=1e-6)
    assert float(metric.cases().n.flatten()[0]) == int((~hidden[0]).sum())
    place = tuple((~hidden[1]).nonzero()[-1].tolist())
    wrong = preds.clone()
    wrong[(1, ..., *place)] = 2
    labels = target.clone()
    labels[(1, *place)] = 7
    for changed in ((wrong, target), (preds, labels)):
        with pytest.raises(ValueError, match="must"):
            metric.update(*changed, **columns)
    assert float(metric.compute()) == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize("kind", ["regions", "shares", "logits"])
def test_large_batches_are_converted_in_pieces(kind, monkeypatch):
    """Pieces of several images, and of one image, give the sums of the whole batch."""
    preds, target = volumes()
    options = {"num_classes": N_CLASSES, "mode": "classwise"}
    if kind == "regions":
        target = torch.nn.functional.one_hot(target, N_CLASSES).movedim(-1, 1)
        options = {"num_labels": N_CLASSES, "class_axis": 1}
    elif kind == "shares":
        target, options = preds.flip(0), options | {"class_axis": 1}
    else:
        preds, target, options = preds[:, 1].logit(), (target == 1).long(), {"task": "binary", "from_logits": True}
    mask = torch.rand(7, *SHAPE, generator=torch.Generator().manual_seed(1)) < 0.7
    found = []
    for sizes in ({}, {"_LARGE": 0, "_CONVERTED": 130, "_ROWS": 10}, {"_LARGE": 0, "_CONVERTED": 10, "_ROWS": 10}):
        for name, size in sizes.items():
            monkeypatch.setattr(pieces, name, size)
        metric = tc.ECE(per_image=True, **options)
        metric.update(preds, target, mask, case=list("abcdefg"))
        function = tc.ece(preds, target, weights=mask, per_image=True, **options)
        found.append((metric.cases().value, metric.cases().n, metric.compute(), function))
        wrong = preds.clone()
        wrong[3] = torch.nan
        with pytest.raises(ValueError, match="`preds` must"):
            metric.update(wrong, target)
    for others in found[1:]:
        for x, y in zip(found[0], others, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


CHOICES = {
    "all": (range(3), {}),
    "foreground": ([1, 2], {"include_background": False}),
    "named": ([2, 0], {"classes": ["tumour", 0], "class_names": ["background", "organ", "tumour"]}),
    "present": (range(3), {"ignore_empty": True}),
    "present foreground": ([1, 2], {"ignore_empty": True, "include_background": False}),
}


@pytest.mark.parametrize("name", slow.ERRORS)
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("task", ["multiclass", "multilabel"])
def test_values_of_classes(name, choice, task):
    """Class-wise and multi-label values are averaged over chosen classes, and then over images."""
    preds, target = volumes()
    one_hot = torch.nn.functional.one_hot(target, N_CLASSES).movedim(-1, 1)
    classes, chosen = CHOICES[choice]
    options = {"num_classes": N_CLASSES, "mode": "classwise"}
    if task == "multilabel":  # regions that overlap
        preds, target = preds.sqrt(), one_hot | one_hot.roll(1, 0)
        options = {"num_labels": N_CLASSES, "class_axis": 1}
    options |= {"n_bins": 6, "right": True}
    values = slow.values_of(
        name, voxels(preds, target), classes, chosen.get("ignore_empty", False), n_bins=6, right=True
    )
    images = tc.Images(**chosen)
    of_classes = [slow.mean(column) for column in zip(*values, strict=True)]
    mean = slow.mean([slow.mean(row) for row in values])
    function = partial(getattr(F, name), preds, target, per_image=images)
    close(function(**options), mean)
    close(function(average=None, **options), of_classes)
    for average, expected in (("macro", mean), (None, of_classes)):
        metric = METRICS[name](average=average, per_image=images, **options)
        for batch in in_batches(preds, target):
            metric.update(*batch)
        close(metric.compute(), expected)
        close(metric.cases().value, values)
    names = {"named": ["tumour", "background"]}.get(choice, list(classes))
    assert [row.label for row in metric.cases()] == names * len(preds)


@pytest.mark.parametrize("chosen", [{"include_background": False}, {"classes": [2, 0]}])
def test_bins_of_equal_mass_of_chosen_classes_equal_a_loop(chosen):
    preds, target = volumes()
    classes = chosen.get("classes", [1, 2])
    how = {"bins": "equal_mass", "n_bins": 4}
    found = F.mce(preds, target, "multiclass", class_axis=1, mode="classwise", per_image=tc.Images(**chosen), **how)
    of_images = [
        [F.mce(image[k].flatten(), (labels == k).long().flatten(), "binary", **how).item() for k in classes]
        for image, labels in zip(preds, target, strict=True)
    ]
    close(found, slow.mean([slow.mean(row) for row in of_images]))


# MONAI, tests/metrics/test_calibration_metric.py: 5 bins; `right=False` there is (a, b]
ONE = torch.tensor([[[[0.7, 0.3], [0.1, 0.9]]]]), torch.tensor([[[[1, 0], [0, 1]]]])
TWO = (
    torch.tensor(
        [[[[0.7, 0.3], [0.1, 0.9]], [[0.7, 0.3], [0.5, 0.5]]], [[[0.9, 0.9], [0.3, 0.3]], [[0.1, 0.1], [0.9, 0.7]]]]
    ),
    torch.tensor([[[[1, 0], [0, 1]], [[0, 1], [1, 0]]], [[[1, 1], [0, 0]], [[0, 0], [1, 1]]]]),
)
OF_MONAI = {
    "ece": ([[0.2]], [[0.2, 0.35], [0.2, 0.15]]),
    "mean_bin_error": ([[0.2]], [[0.2, 1.4 / 3], [0.2, 0.5 / 3]]),
    "mce": ([[0.3]], [[0.3, 0.7], [0.3, 0.3]]),
}


@pytest.mark.parametrize("name", OF_MONAI)
def test_values_of_monai(name):
    """The published values of MONAI hold, for each of its reductions over images and channels."""
    for (preds, target), expected in zip((ONE, TWO), OF_MONAI[name], strict=True):
        options = {"num_labels": preds.shape[1], "class_axis": 1, "n_bins": 5, "right": True, "per_image": True}
        metric = streamed(METRICS[name], [(preds, target)], **options)
        found, expected = metric.cases().value, torch.tensor(expected)
        reductions = {
            "mean": (metric.compute(), expected.mean()),
            "none": (found, expected),
            "mean_batch": (
                streamed(METRICS[name], [(preds, target)], average=None, **options).compute(),
                expected.mean(0),
            ),
            "mean_channel": (found.nanmean(1), expected.mean(1)),
            "sum": (found.nansum(), expected.sum()),
        }
        for value, published in reductions.values():
            torch.testing.assert_close(value.float(), published, rtol=0, atol=1e-6)
    metric.update(preds, target)  # more iterations of the same images do not change the mean
    torch.testing.assert_close(metric.compute().float(), expected.mean(), rtol=0, atol=1e-6)
    options |= {"per_image": tc.Images(include_background=False)}
    foreground = streamed(METRICS[name], [(preds, target)], **options)
    torch.testing.assert_close(foreground.compute().float(), expected[:, 1].mean(), rtol=0, atol=1e-6)


def test_binary_images():
    """Binary images have probabilities (B, 1, H, W) or (B, H, W); masks may have a channel axis."""
    preds, target = volumes()
    p, y = preds[:, 1], (target == 1).long()
    mask = torch.rand(y.shape, generator=torch.Generator().manual_seed(2)) < 0.5
    both = voxels(torch.stack((1 - p, p), 1), torch.stack((1 - y, y), 1), mask)
    expected = slow.mean([slow.value_of("ece", image, 1) for image in both])
    for columns in ((p, y, mask), (p[:, None], y[:, None], mask[:, None])):
        metric = streamed(tc.ECE, [columns], task="binary", per_image=True)
        close(metric.compute(), expected)
    metric = streamed(tc.ECE, [(preds, target[:, None], mask[:, None])], num_classes=N_CLASSES, per_image=True)
    close(metric.compute(), F.ece(preds, target, weights=mask, per_image=True))


def test_logits_and_ambiguous_axes():
    preds, target = volumes()
    metric = streamed(tc.NLL, [(preds.log(), target)], num_classes=N_CLASSES, per_image=True, from_logits=True)
    close(metric.compute(), F.nll(preds, target, per_image=True))
    last = preds.movedim(1, -1)
    close(F.ece(last, target, per_image=True), F.ece(preds, target, per_image=True))
    square = torch.full((2, 3, 3), 1 / 3)
    with pytest.raises(ValueError, match="`class_axis` must be given"):
        F.ece(square, torch.zeros(2, 3, dtype=torch.long), per_image=True)


def test_windows_of_a_case():
    """Windows with the same name are one image, in any order and in any number of batches."""
    preds, target = volumes(4)
    names = ["a", "b", "c", "d"]
    options = {"num_classes": N_CLASSES, "mode": "classwise", "per_image": True}
    whole = tc.ECE(**options)
    whole.update(preds, target, case=names)
    windows = tc.ECE(**options)
    for column in range(SHAPE[1]):
        some = slice(None) if column % 2 else [2, 0, 3, 1]
        windows.update(
            preds[some][..., column], target[some][..., column], case=[names[k] for k in torch.arange(4)[some].tolist()]
        )
    close(windows.compute(), whole.compute())
    found = {(row.case, row.label): (row.n, row.value) for row in windows.cases()}
    for row in whole.cases():
        assert found[row.case, row.label] == (row.n, pytest.approx(row.value, abs=1e-12))
    once = tc.ECE(**options)
    once.update(preds[..., 0].repeat(2, 1, 1), target[..., 0].repeat(2, 1), case=[7, 8, 9, 10] * 2)
    assert once.cases().names == ["7", "8", "9", "10"]
    one = tc.ECE(**options)
    one.update(preds, target, case="x")
    close(one.compute(), F.ece(preds, target, mode="classwise"))
    assert sum(len(sums) for sums in windows.state.sums) <= 8  # the state is that of the cases, not of the windows


def test_collections_share_batches():
    preds, target = volumes()
    made = {name: cls(num_classes=N_CLASSES, per_image=True) for name, cls in METRICS.items()}
    collection = tc.CalibrationCollection({**made, "plain": tc.ECE(num_classes=N_CLASSES)})
    for k, batch in enumerate(in_batches(preds, target)):
        collection.update(*batch, **({"case": [f"{k}-{j}" for j in range(len(batch[0]))]} if k % 2 else {}))
    values = collection.compute()
    for name in METRICS:
        close(values[name], getattr(F, name)(preds, target, per_image=True))
    close(values["plain"], F.ece(preds, target))


def test_gradient():
    """Values per image have the gradient of the mean of values, also beside an image without voxels."""
    preds, target = volumes()
    mask = torch.ones_like(target, dtype=torch.bool)
    mask[2] = False
    x = preds.clone().requires_grad_()
    (found,) = torch.autograd.grad(F.ece(x, target, weights=mask, per_image=True, mode="classwise"), x)
    y = preds.clone().requires_grad_()
    others = [F.ece(y[k : k + 1], target[k : k + 1], mode="classwise", class_axis=1) for k in (0, 1, 3, 4, 5, 6)]
    (expected,) = torch.autograd.grad(torch.stack(others).mean(), y)
    close(found, expected)


def test_test_and_intervals():
    """Images are the independent units: the test is that of `Clustered`, and intervals resample images."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(30, 1, generator=generator) + torch.randn(30, 40, generator=generator)
    target = (torch.rand(30, 40, generator=generator) < logits.sigmoid()).long()
    preds = (logits + torch.randn(30, 1, generator=generator)).sigmoid()
    metric = streamed(tc.ECE, [(preds, target)], task="binary", per_image=True)
    clustered = tc.Clustered(tc.ECE(task="binary"))
    clustered.update(preds, target, clusters=torch.arange(30))
    mine, theirs = metric.test(), clustered.test()
    close(mine.statistic, float(theirs.statistic))
    close(mine.design_effect, float(theirs.design_effect))
    for field in ("noise_floor", "low", "high"):  # random signs depend on the order of clusters
        assert float(getattr(mine, field)) == pytest.approx(float(getattr(theirs, field)), abs=0.01)
    assert (mine.n_clusters, float(mine.p_value)) == (30, pytest.approx(float(theirs.p_value), abs=0.02))
    cases = metric.cases()
    interval = cases.interval(n_replicates=99)
    assert float(interval.low) < float(cases.mean) < float(interval.high)
    standard_error = float(cases.value.std()) / math.sqrt(30)
    assert float(cases.interval().standard_error) == pytest.approx(standard_error, rel=0.15)
    patients = {k: f"patient {k // 3}" for k in range(30)}
    assert cases.test(clusters=patients).n_clusters == 10
    of_patients = cases.interval(clusters=[f"patient {k // 3}" for k in range(30)], n_replicates=199)
    assert of_patients.n_clusters == 10
    # Copies of the same images are no new information about patients
    doubled = streamed(tc.ECE, [(preds, target), (preds, target)], task="binary", per_image=True).cases()
    both = doubled.interval(clusters=[*range(30), *range(30)], n_replicates=199)
    close(both.replicates, cases.interval(n_replicates=199).replicates.tolist())


def test_difference_of_models():
    preds, target = volumes(20, seed=4)
    cases = []
    for p, order in ((preds, torch.arange(20)), ((2 * preds.log()).softmax(1), torch.arange(20).flip(0))):
        metric = tc.ECE(num_classes=N_CLASSES, per_image=True)
        metric.update(p[order], target[order], case=order)
        cases.append(metric.cases())
    found = cases[0].difference(cases[1])
    close(found.value, float(cases[0].mean - cases[1].mean))
    assert float(found.low) < float(found.value) < float(found.high) < 0  # the second model is sharper
    other = streamed(tc.ECE, [(preds, target)], num_classes=N_CLASSES, per_image=True).cases()
    with pytest.raises(ValueError, match="`other` must have the same images"):
        cases[0].difference(other)


def test_worst_cases():
    """The image that is wrong everywhere is the worst one, by the shrunk value."""
    generator = torch.Generator().manual_seed(5)
    preds = torch.rand(8, 1, 400, generator=generator)
    target = (torch.rand(8, 1, 400, generator=generator) < preds).long()
    target[5] = 1 - target[5]
    small = preds[:1, :, :3], 1 - target[:1, :, :3]  # a tiny image with a large error by chance
    metric = tc.ECE(task="binary", per_image=True)
    metric.update(preds, target, case=[f"scan {k}" for k in range(8)])
    metric.update(*small, case="tiny")
    worst = metric.cases().worst(2)
    assert worst.group[0] == "scan 5"
    assert worst.n_groups == 9
    classes = streamed(tc.ECE, [volumes()], num_classes=N_CLASSES, mode="classwise", per_image=True)
    assert all(name.split(", ")[1] in "012" for name in classes.cases().worst(5).group)
    with pytest.raises(TypeError, match="`metric` must be a calibration error"):
        streamed(tc.NLL, [volumes()], num_classes=N_CLASSES, per_image=True).cases().worst()


def test_joint_histogram():
    """Entry (b, m) counts the images whose frequency in bin b is in interval m."""
    preds, target = volumes()
    metric = streamed(tc.ECE, [(preds, target)], num_classes=N_CLASSES, mode="classwise", n_bins=4, per_image=True)
    found = metric.cases().reliability_histogram(3)
    expected = torch.zeros(N_CLASSES, 4, 3, dtype=torch.long)
    for image in voxels(preds, target):
        for k in range(N_CLASSES):
            for b, _, _, f, _ in slow.bins_of([(q[k], t[k], w) for q, t, w in image], 4, False):
                expected[k, b, min(2, math.floor(3 * f + 1e-12))] += 1
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("size", [2**18, pytest.param(2**25, marks=pytest.mark.long)])
def test_large_volumes(size):
    """A volume of 2^25 voxels has the value of its 64 windows to 1e-12, and that of exact arithmetic."""
    preds = torch.tensor([0.1, 0.9]).repeat(size // 2).view(1, 1, size)
    target = (torch.arange(size) % 20 == 0).long() | (torch.arange(size) % 20 > 3).long() * (torch.arange(size) % 2)
    target = target.view(1, 1, size)
    whole = streamed(tc.ECE, [(preds, target)], task="binary", per_image=True)
    windows = tc.ECE(task="binary", per_image=True)
    for p, y in zip(preds.chunk(64, -1), target.chunk(64, -1), strict=True):
        windows.update(p, y, case="volume")
    p, y = preds.flatten(), target.flatten()
    gaps = [int(y[p < 0.5].sum()) - size // 2 * float(p[0].double()), int(y[p > 0.5].sum()) - size // 2 * float(p[1])]
    close(whole.compute(), sum(map(abs, gaps)) / size)
    close(windows.compute(), float(whole.compute()))


@pytest.mark.parametrize(
    ("width", "spacing"), [(1, None), (1.5, None), (2, None), (3.1, (1.0, 2.5)), (0.5, (1.0, 2.5))]
)
@pytest.mark.parametrize("ignored", [None, 2])
def test_boundary_band(width, spacing, ignored):
    """The band is that of a loop over pairs of voxels."""
    _, target = volumes(4, seed=6)
    found = tc.boundary_band(target, width, spacing, ignore_index=ignored)
    for labels, band in zip(target, found, strict=True):
        by_place = {(i, j): int(labels[i, j]) for i in range(SHAPE[0]) for j in range(SHAPE[1])}
        expected = slow.near_edge(by_place, SHAPE, width, spacing or (1, 1), ignored)
        assert {(i, j): bool(band[i, j]) for i, j in by_place} == expected
    channels = tc.boundary_band(target[:, None], width, spacing, ignore_index=ignored)
    assert torch.equal(channels[:, 0], found)


def test_boundary_band_of_a_volume():
    target = torch.zeros(1, 6, 6, 6, dtype=torch.uint8)
    target[:, 3:] = 1
    band = tc.boundary_band(target, 2.0, spacing=(2.0, 1.0, 1.0))
    assert band[0].any(-1).any(-1).tolist() == [False, False, True, True, False, False]
    regions = torch.stack((target, target.roll(1, 1)), 1)
    assert tc.boundary_band(regions, 1, spacing=(1, 1, 1)).shape == regions.shape
