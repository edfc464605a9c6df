"""Claims about declared metrics, their reduction and the step record."""

import math
import warnings

import pytest

from offbeat.observe.metrics import (
    METRICS,
    PROX_APPROXIMATIONS,
    PROX_MEASURES,
    MetricReducer,
    Reduction,
    StepRecord,
    UndeclaredMetric,
    declared,
    dropped_name,
    prox_name,
)
from offbeat.types import DropReason


def test_unknown_name_is_a_value_error_that_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"'actor/entropi'.*nearest is 'actor/entropy'"):
        declared("actor/entropi")


def test_record_with_an_unknown_name_is_refused_where_warnings_are_errors() -> None:
    record = StepRecord(step=1, version=1, seconds=1.0, metrics={"reward/meen": 0.5})
    with pytest.raises(UndeclaredMetric, match="reward/mean"):
        record.flat()


def test_record_with_an_unknown_name_only_warns_in_a_users_run() -> None:
    record = StepRecord(step=1, version=1, seconds=1.0, metrics={"reward/meen": 0.5})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        flat = record.flat()
    assert flat["reward/meen"] == 0.5
    assert [w.category for w in caught] == [UndeclaredMetric]


def test_every_name_has_area_and_quantity_and_one_declaration() -> None:
    for name, metric in METRICS.items():
        area, quantity = name.split("/")
        assert area, name
        assert quantity, name
        assert metric.name == name
        assert metric.meaning


def test_each_drop_reason_has_a_summed_metric() -> None:
    assert all(declared(dropped_name(r)).reduction is Reduction.SUM for r in DropReason)


def test_reward_parts_carry_the_users_names_but_not_an_empty_one() -> None:
    assert declared("reward_part/format").reduction is Reduction.MEAN
    with pytest.raises(UndeclaredMetric):
        declared("reward_part/")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("reward/mean", (1.0 * 3 + 4.0 + 2.0) / 5),
        ("wait/data_seconds", 7.0),
        ("lag/group_max", 4.0),
        ("reward/min", 1.0),
        ("actor/lr", 2.0),
    ],
)
def test_each_metric_is_reduced_by_its_own_rule(name: str, expected: float) -> None:
    reducer = MetricReducer()
    reducer.add(name, 1.0, weight=3.0)
    reducer.add(name, 4.0)
    reducer.add(name, 2.0)
    assert reducer.reduced() == {name: pytest.approx(expected, rel=1e-15)}


@pytest.mark.parametrize("values", [[math.nan, 1.0], [1.0, math.nan]])
@pytest.mark.parametrize("name", ["lag/group_max", "reward/min", "reward/mean"])
def test_a_measured_nan_stays_visible_whatever_the_order(name: str, values: list[float]) -> None:
    reducer = MetricReducer()
    for value in values:
        reducer.add(name, value)
    assert math.isnan(reducer.reduced()[name])


def test_reducer_refuses_an_undeclared_name() -> None:
    with pytest.raises(UndeclaredMetric):
        MetricReducer().add("actor/los", 1.0)


def test_every_measure_of_every_approximation_is_declared_with_its_reduction() -> None:
    names = {prox_name(a, m): m for a in PROX_APPROXIMATIONS for m in PROX_MEASURES}
    assert len(names) == 3 * 11
    assert names["actor/prox_behave_relative_error_linear_mean"] == "behave_relative_error_mean"
    for name, measure in names.items():
        largest = measure.endswith("_max")
        assert declared(name).reduction is (Reduction.MAX if largest else Reduction.MEAN)


def test_weight_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="weight must be positive"):
        MetricReducer().add("reward/mean", 1.0, weight=0.0)
