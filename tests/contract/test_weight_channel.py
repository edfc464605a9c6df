"""What every weight channel promises, run on each implementation."""

from __future__ import annotations

import threading

import pytest
import torch

from offbeat.errors import WeightSyncError
from offbeat.types import PolicyVersion
from offbeat.weights.channel import CHANNELS, WeightChannel

V1, V2 = PolicyVersion(1), PolicyVersion(2)


@pytest.fixture(params=sorted(CHANNELS))
def channel(request: pytest.FixtureRequest) -> WeightChannel:
    return CHANNELS[request.param]


def params(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((3, 2), value), "b": torch.full((5,), value)}


@pytest.mark.invariant("I14")
def test_every_subscriber_ends_with_the_published_digest(channel: WeightChannel) -> None:
    publisher = channel.publisher(params(1.5).items())
    subscribers = [channel.subscriber(params(0.0)) for _ in range(2)]
    update = publisher.publish(V1)
    for subscriber in subscribers:
        subscriber.stage(update)
        subscriber.commit(V1)
    assert [s.digest_of_live() for s in subscribers] == [update.digest] * 2
    publisher.close()


def test_stage_leaves_the_parameters_alone(channel: WeightChannel) -> None:
    publisher, live = channel.publisher(params(1.5).items()), params(0.0)
    subscriber = channel.subscriber(live)
    subscriber.stage(publisher.publish(V1))
    assert torch.equal(live["a"], params(0.0)["a"])
    subscriber.close()
    publisher.close()


def test_stage_in_another_thread_can_be_committed_here(channel: WeightChannel) -> None:
    publisher, live = channel.publisher(params(1.5).items()), params(0.0)
    subscriber = channel.subscriber(live)
    thread = threading.Thread(target=subscriber.stage, args=(publisher.publish(V1),))
    thread.start()
    thread.join()
    subscriber.commit(V1)
    assert torch.equal(live["b"], params(1.5)["b"])
    publisher.close()


def test_second_stage_replaces_the_first(channel: WeightChannel) -> None:
    source, live = params(1.5), params(0.0)
    publisher, subscriber = channel.publisher(source.items()), channel.subscriber(live)
    subscriber.stage(publisher.publish(V1))
    source["a"].fill_(2.5)
    subscriber.stage(publisher.publish(V2))
    with pytest.raises(WeightSyncError):
        subscriber.commit(V1)
    subscriber.commit(V2)
    assert torch.equal(live["a"], source["a"])
    publisher.close()


def test_commit_without_stage_is_an_error(channel: WeightChannel) -> None:
    with pytest.raises(WeightSyncError, match="1"):
        channel.subscriber(params(0.0)).commit(V1)


def test_closing_twice_is_allowed(channel: WeightChannel) -> None:
    publisher, subscriber = channel.publisher(params(1.0).items()), channel.subscriber(params(0.0))
    subscriber.stage(publisher.publish(V1))
    for end in (subscriber, publisher, subscriber, publisher):
        end.close()
    with pytest.raises(WeightSyncError):
        subscriber.commit(V1)
