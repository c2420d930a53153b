"""Table of the values of images, with their mean, pooled value, test, intervals and joint histogram."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import Tensor

from torchcalib.core.arguments import check_count, check_level, check_seed
from torchcalib.core.clusters import MAX_CLUSTERS, effective_number, identifiers, least_of_batch, numbered
from torchcalib.core.images import ImagePartition, mean_over_images
from torchcalib.core.partition import Partition
from torchcalib.core.sums import BinStats
from torchcalib.display.tables import Cell, Column, Table, Tabular, attribute_column, number
from torchcalib.display.words import count, printable
from torchcalib.functional.estimator import Estimator
from torchcalib.inference.resampling import Interval, Weights
from torchcalib.inference.testing import CalibrationTest
from torchcalib.io.errors import shown
from torchcalib.ops.segments import bin_index
from torchcalib.results.group_table import By, GroupTable, resolved


@dataclass(frozen=True)
class Case:
    """Value of an image, or of a class in an image.

    Attributes:
        case: name of the image, or its number in the order of updates.
        label: name or index of the class or label; None for a metric with one value per image.
        n: total weight of the voxels; their number without weights.
        value: value of the metric; NaN without voxels, or for an empty class with `ignore_empty`.
    """

    case: str | int
    label: str | int | None
    n: float
    value: float


@dataclass(frozen=True, eq=False, repr=False)
class Cases(Tabular):
    """Table of the values of images, or of classes in images; see `CalibrationMetric.cases`.

    Iteration yields a `Case` for each row. Images are in the order of updates. After merging, those of the first state
    precede those of the second.

    Attributes:
        estimator: metric with its options.
        parts: sums of each image.
        metric: name of the metric.

    Example:
        >>> from torchcalib import ECE
        >>> metric = ECE(task="binary", per_image=True)
        >>> metric.update(torch.tensor([[0.2, 0.9], [0.4, 0.6]]), torch.tensor([[0, 1], [0, 0]]), case=["a", "b"])
        >>> print(metric.cases())
        case  n    ECE
        a     2  0.150
        b     2  0.500
        >>> metric.cases().mean, metric.cases().pooled
        (tensor(0.3250, dtype=torch.float64), tensor(0.3250, dtype=torch.float64))
    """

    estimator: Estimator[Any]
    parts: ImagePartition
    metric: str

    @cached_property
    def names(self) -> list[str | int]:
        """Name of each of G images, or its number without a name."""
        return [name or k for k, name in enumerate(self.parts.names)]

    @property
    def labels(self) -> list[int | str] | None:
        """Name or index of each of K classes; None for a metric with one value per image."""
        images, has_classes = self.estimator.images, self.value.dim() == 2
        assert images is not None  # values per image
        return images.names(self.parts.sums.shape[1]) if has_classes else None

    @cached_property
    def value(self) -> Tensor:
        """Value of each image `(G,)`, or of each class in each image `(G, K)`, float64; NaN without a value."""
        return self.estimator.values_of_images(self.parts.each).detach()

    @cached_property
    def n(self) -> Tensor:
        """Total weight of the voxels of each value, of the shape of `value`."""
        total: Tensor = self._chosen.sums[..., 0, :].sum(-1)
        return total

    @property
    def mean(self) -> Tensor:
        """Mean over images `()`, or `(K,)` with `average=None`: the value of `compute`."""
        return mean_over_images(self.value, self.estimator.averages)

    @property
    def pooled(self) -> Tensor:
        """Value of all voxels together `()`, or `(K,)` with `average=None`."""
        return self._plain.value(self._partition().whole)

    @property
    def _plain(self) -> Estimator[Any]:
        return replace(self.estimator, images=None)

    @cached_property
    def _chosen(self) -> Any:
        """Statistic of each image for the chosen classes."""
        images = self.estimator.images
        assert images is not None  # values per image
        return images.chosen(self.parts.each)

    def _partition(self, numbers: Tensor | None = None, n: int | None = None) -> Partition[Any]:
        """Return the sums of the chosen classes of each image, or of each of n clusters with `numbers` in [0, n)."""
        sums = self._chosen.sums.detach()
        if numbers is not None and n is not None:
            sums = sums.new_zeros(n, *sums.shape[1:]).index_add(0, numbers.to(sums.device), sums)
        return Partition(sums, self.parts.accumulator, n_distinct=n or len(sums))

    def _clusters(self, clusters: Any) -> Tensor | None:
        """Return the identifier of the cluster of each image, int64 `(G,)` on the CPU; None without clusters."""
        if clusters is None:
            return None
        if isinstance(clusters, Mapping):
            missing = [name for name in self.names if name not in clusters]
            if missing:
                raise ValueError(f"`clusters` must have a cluster for each image, got none for {shown(missing[0])}.")
            clusters = [clusters[name] for name in self.names]
        found = identifiers(clusters).cpu()
        if found.shape != (len(self.names),):
            raise ValueError(
                f"`clusters` must have one entry for each of the {len(self.names)} images, got shape "
                f"{tuple(found.shape)}. Pass a mapping of names of images to clusters, or one entry for each image."
            )
        return found

    def test(
        self, *, clusters: Any = None, level: float = 0.95, n_replicates: int = 999, seed: int = 0
    ) -> CalibrationTest:
        """Test calibration with images, or `clusters` of them, as independent units.

        Voxels of an image depend on each other. The statistic is the pooled error of all voxels, whose outcomes are
        compared with their confidences; see `torchcalib.inference.clusters`. More than 1,024 units are merged.

        Args:
            clusters: Cluster of each image, such as its patient: a list in the order of images, or a mapping from names
                of images. None makes each image independent.
            level: Level of the interval, in (0, 1).
            n_replicates: Number R of simulated replicates. The smallest possible p-value is 1 / (R + 1).
            seed: Seed for the simulation.

        Returns:
            The test of the pooled error, float64 `()`, or `(K,)` with `average=None`.

        Raises:
            TypeError: If the metric is not a calibration error.
            ValueError: For invalid arguments.
        """
        self._check_test()
        given = self._clusters(clusters)
        images = torch.arange(len(self.names), device="cpu")
        numbers = images % MAX_CLUSTERS if given is None else numbered(given, MAX_CLUSTERS)
        n = int(numbers.max()) + 1 if len(numbers) else 1
        n_distinct = len(self.names) if given is None else len(torch.unique(given))
        partition = replace(self._partition(numbers, n), n_distinct=n_distinct)
        how: dict[str, Any] = {"level": level, "n_replicates": n_replicates, "seed": seed}
        return self._plain.test_from(partition.whole, clusters=partition, **how)

    def _check_test(self) -> None:
        if type(self.estimator).test_from is Estimator.test_from:
            raise TypeError(
                f"`metric` must be a calibration error to have a noise floor, got {self.metric}. Its method interval() "
                "needs none."
            )

    def interval(
        self, *, clusters: Any = None, level: float = 0.95, n_replicates: int = 999, seed: int = 0
    ) -> Interval:
        """Return the mean over images with its bootstrap interval. Images, or `clusters` of them, are resampled.

        Args:
            clusters, level, n_replicates, seed: See `test`.
        """
        return self._interval(self.value, clusters, level, n_replicates, seed)

    def difference(
        self, other: "Cases", *, clusters: Any = None, level: float = 0.95, n_replicates: int = 999, seed: int = 0
    ) -> Interval:
        """Return the mean over images of this value minus that of another model, with its bootstrap interval.

        Only images with a value for both models count. Without names, images must be in the same order.

        Args:
            other: Values of another model for the same images.
            clusters, level, n_replicates, seed: See `test`.

        Raises:
            ValueError: If the images or the classes differ.
        """
        places = {name: k for k, name in enumerate(other.names)}
        if set(places) != set(self.names) or self.labels != other.labels:
            found = f"{len(set(other.names) - set(self.names))} other images and classes {shown(other.labels)}"
            raise ValueError(
                f"`other` must have the same images and classes, got {found}. Pass equal names as `case` in `update`."
            )
        theirs = other.value[[places[name] for name in self.names]]
        return self._interval(self.value - theirs, clusters, level, n_replicates, seed)

    def _interval(self, values: Tensor, clusters: Any, level: float, n_replicates: int, seed: int) -> Interval:
        """Return the mean over images of values `(G,)` or `(G, K)`, with its bootstrap interval."""
        check_count("n_replicates", n_replicates)
        check_level(level, n_replicates)
        check_seed(seed)
        present = values.isfinite() if values.dim() == 1 else values.isfinite().any(-1)
        groups = self._clusters(clusters)
        groups = None if groups is None else groups.to(values.device)
        drawn = Weights.with_replacement(seed, present, groups)
        weights = torch.cat(list(drawn.chunks(n_replicates, len(values))))
        sizes = present.to(values)
        if groups is not None:
            numbers = torch.unique(groups, return_inverse=True)[1]
            sizes = values.new_zeros(int(numbers.max()) + 1 if len(numbers) else 0).index_add(0, numbers, sizes)
        averages = self.estimator.averages
        replicates = mean_over_images(values, averages, weights)
        return Interval(mean_over_images(values, averages), replicates, level, least_of_batch(effective_number(sizes)))

    def worst(self, k: int | None = 10, *, by: By = "shrunk", n_replicates: int = 199, seed: int = 0) -> GroupTable:
        """Return the k images, or classes in images, with the largest calibration error.

        Small images have large errors because of sampling noise. The shrunk value reduces this; see `GroupTable`.
        p-values assume independent voxels. They are therefore too small for voxels that depend on each other.

        Args:
            k: Number of rows; None for all.
            by: Quantity to sort by; see `ByGroup.worst`.
            n_replicates: Number of simulated replicates per row.
            seed: Seed for the simulation.

        Raises:
            TypeError: If the metric is not a calibration error.
            ValueError: For invalid arguments.
        """
        self._check_test()
        plain = replace(self._plain, averages=False)
        # A row of the table is a batch element of the test.
        sums, value = self._chosen.sums.detach(), self.value.flatten()
        rows = sums.reshape(-1, *sums.shape[-2:])
        present = value.isfinite().nonzero().squeeze(-1)

        def tested(numbers: Tensor, n: int) -> CalibrationTest:
            statistic = self.parts.accumulator.wrap(rows[present[numbers]])
            return plain.test_from(statistic, level=0.95, n_replicates=n, seed=seed)

        found = resolved(tested(torch.arange(len(present), device=rows.device), n_replicates), tested, n_replicates)
        labels = self.labels
        names = self.names if labels is None else [f"{case}, {label}" for case, label in product(self.names, labels)]
        chosen = [names[place] for place in present.tolist()]
        return GroupTable.from_test(chosen, self.n.flatten()[present], found, k=k, by=by)

    def reliability_histogram(self, n_frequencies: int = 15) -> Tensor:
        """Return the joint histogram of confidence and frequency over images, int64 `(B, M)` or `(K, B, M)`.

        [0, 1] is divided into M equal intervals. Entry (b, m) is the number of images whose frequency of the event in
        bin b is in interval m. For a calibrated model, all images are near the diagonal. Images without voxels in bin b
        are not counted there.

        Args:
            n_frequencies: Number M of intervals of the frequency.

        Raises:
            TypeError: If the metric has no bins.

        Reference:
            Barfoot et al.: Average Calibration Losses for Reliable Uncertainty in Medical Image Segmentation (2025),
            arXiv 2506.03942: dataset reliability histogram.
        """
        check_count("n_frequencies", n_frequencies)
        bins = self._chosen
        if not isinstance(bins, BinStats):
            raise TypeError(f"`metric` must be an error over bins, got {self.metric}. Use ECE, for example.")
        cell = bin_index(bins.frequency.detach().nan_to_num(0), n_frequencies, False)
        one_hot = torch.nn.functional.one_hot(cell, n_frequencies) * (bins.n > 0).unsqueeze(-1)
        return one_hot.sum(0)

    def __len__(self) -> int:
        return self.value.numel()

    def __iter__(self) -> Iterator[Case]:
        labels: Sequence[int | str | None] = self.labels or [None]
        names = product(self.names, labels)
        columns = zip(names, self.n.flatten().tolist(), self.value.flatten().tolist(), strict=True)
        return (Case(case, label, n, value) for (case, label), n, value in columns)

    def rows(self) -> list[dict[str, Any]]:
        """Return one dict for each row, with the fields of `Case`."""
        return [vars(row) for row in self]

    def layout(self) -> Table:
        """Return a formatted `Table` with one row for each image, or class in an image."""

        def named(value: object) -> Cell:
            return Cell("" if value is None else printable(str(value)), style="name")

        columns: Sequence[Column] = [
            attribute_column("case", "case", named, is_number=False, wraps=True),
            attribute_column("class", "label", named, is_number=False),
            attribute_column("n", "n", lambda n: Cell(count(n))),
            attribute_column(self.metric, "value", lambda x: Cell("-") if math.isnan(x) else number(x)),
        ]
        return Table.from_items(columns, {"": list(self)}, is_wide=False)

    def __repr__(self) -> str:
        return str(self)
