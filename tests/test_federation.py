import logging

import numpy as np
import pytest

from fbnll import federation as library
from fbnll.federation import Failure, Round, TooManyMissing, User, checkpoint, federation, find_job, like, on_user, per_cluster, resume
from fbnll.payload import pack, unpack
from fbnll.transports import Faulty, InProcess, Loopback

K, C, d = 5, 3, 4


@pytest.fixture(autouse=True)
def _trusted(monkeypatch):
    monkeypatch.setattr(library, "TRUSTED", (*library.TRUSTED, "test_federation:"))


@on_user(reply={"n": "i8", "mean": "f4 d"}, features="clustering")
def describe(user, message, rng):
    return {"n": len(user.labels), "mean": user.features.mean(0)}


@on_user(reply={"draw": "f8 n"})
def draw(user, message, rng):
    return {"draw": rng.random(message["n"])}


@on_user(reply={"w": like("w")})
def shift(user, message, rng):
    return {"w": {name: part + user.labels[0] for name, part in message["w"].items()}}


@on_user(reply={"total": "i8"}, keeps="total")
def count_up(user, message, rng):
    user.state["total"] = user.state.get("total", np.zeros((), np.int64)) + 1
    return {"total": user.state["total"]}


@on_user(reply={"x": "f4"}, once=True)
def once(user, message, rng):
    return {"x": 1.0}


@on_user(reply={"x": "f4 2"})
def misbehave(user, message, rng):
    if user.labels[0] == 1:
        return write(message) if "w" in message else REPLIES[message["how"]](user)
    return {"x": np.ones(2)}


def write(message):
    message["w"][:] = 1
    return {"x": np.ones(2)}


def remember(user):
    user.state["secret"] = np.ones(1)
    return {"x": np.ones(2)}


def quote(user):
    raise ValueError("secret sample 42")


REPLIES = {
    "an error that quotes": quote,
    "wrong shape": lambda user: {"x": np.ones(3)},
    "wrong dtype": lambda user: {"x": np.array(["a", "b"])},
    "not finite": lambda user: {"x": np.array([1, np.nan])},
    "infinite in float32": lambda user: {"x": np.array([1, 1e300])},
    "extra part": lambda user: {"x": np.ones(2), "labels": user.labels},
    "missing part": lambda user: {},
    "not a dictionary": lambda user: [1, 2],
    "undeclared state": remember,
    "an exception": lambda user: 1 / 0,
    "truth": lambda user: user.truth,
    "a system exit of numpy": lambda user: np.linalg.inv(np.zeros((2, 2))),
}


def user(k: int, **changes) -> User:
    Z = np.full((k + 2, d), float(k), np.float32)
    settings = {"number": k, "X": Z, "given": np.full(k + 2, k), "features": {"clustering": (Z, "Φ1")}, "C": C, "K": K, "seed": 0}
    return User(**{**settings, "truth": {"labels": np.zeros(k + 2, np.int64)}, **changes})


def five(transport=InProcess, wrap=lambda inner: inner, **changes):
    settings = {"K": K, "C": C, "phi": {"clustering": (d, "Φ1")}, **changes}
    return federation(wrap(transport([user(k) for k in range(K)])), **settings)


both = pytest.mark.parametrize("transport", [InProcess, Loopback])


@both
def test_a_table_has_a_row_for_every_user_and_the_missing_value_for_those_without_a_reply(transport):
    fed = five(transport, lambda inner: Faulty(inner, lambda ask, tries: "message lost" if ask.user == 2 else None))
    table = fed.table(describe)
    assert table["n"].tolist() == [2, 3, 0, 5, 6]
    np.testing.assert_array_equal(table["mean"][[0, 4]], [[0] * d, [4] * d])
    assert np.isnan(table["mean"][2]).all()
    assert (fed.only([1, 2]).table(describe, missing=0)["mean"].sum(1) == [0, d, 0, 0, 0]).all()


@both
def test_a_mean_is_weighted_per_column_over_those_that_replied(transport):
    fed = five(transport, lambda inner: Faulty(inner, lambda ask, tries: "reply lost" if ask.user == 4 else None))
    weights = np.array([[1, 0, 0], [1, 0, 0], [0, 1, 0], [0, 3, 0], [0, 0, 1]])
    messages = {k: {"w": {"a": np.zeros(2, np.float32), "b": np.zeros((), np.float32)}} for k in range(K)}
    first, second, nobody = fed.mean(shift, messages, weights)
    assert first["w"]["a"].tolist() == [0.5, 0.5]
    assert second["w"]["a"].tolist() == [2.75, 2.75]
    assert first["w"]["a"].dtype == np.float32
    assert nobody is None


@both
@pytest.mark.parametrize("how", REPLIES)
def test_a_bad_reply_is_a_missing_user_and_one_line_and_the_others_are_unaffected(transport, how, caplog):
    fed = five(transport)
    with caplog.at_level(logging.WARNING, "fbnll"):
        replies = fed.ask_all(misbehave, {"how": how})
    assert sorted(replies) == [0, 2, 3, 4]
    (record,) = caplog.records
    assert record.getMessage().startswith("misbehave failed on 1 of 5 users: user 1: ")
    assert "\n" not in record.getMessage()


def test_a_reply_is_a_copy_and_a_message_cannot_be_changed():
    fed = five()
    w = np.zeros(2, np.float32)
    reply = fed.ask_all(shift, {"w": {"a": w}})[3]["w"]["a"]
    reply[:] = 7
    assert fed.ask_all(shift, {"w": {"a": w}})[3]["w"]["a"].tolist() == [3, 3]
    assert 1 not in fed.ask_all(misbehave, {"how": "a changed message", "w": w})
    assert w.tolist() == [0, 0]


HOSTILE = {
    "nothing": b"",
    "a pickle": b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
    "too long": bytes(10**6),
    "another reply": pack({"reply": {"x": np.ones(3, np.float32)}}),
    "a lie about names": pack({"reply": {"y": np.ones(2, np.float32)}}),
    "no reply": pack({"other": 1}),
    "reply is a list": pack({"reply": [1]}),
    "NaN": pack({"reply": {"x": np.full(2, np.nan, np.float32)}}),
    "float64": pack({"reply": {"x": np.ones(2)}}),
    "failure that is not text": pack({"failure": {"a": np.ones(2)}}),
    "failure with control characters": pack({"failure": "\x1b[2J\nfbnll: all is well " + "x" * 10_000}),
    "an object": {"x": np.array([object(), object()])},
    "a plain list": {"x": [1.0, 2.0]},
}


@both
@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_replies_are_one_line_and_the_others_are_unaffected(transport, what, caplog):
    fed = five(transport, lambda inner: Faulty(inner, lambda ask, tries: (lambda reply: HOSTILE[what]) if ask.user == 1 else None))
    with caplog.at_level(logging.WARNING, "fbnll"):
        assert sorted(fed.ask_all(misbehave, {"how": "wrong shape"})) == [0, 2, 3, 4]
    (record,) = caplog.records
    assert "\n" not in record.getMessage()
    assert "\x1b" not in record.getMessage()
    assert len(record.getMessage()) < 500


def test_words_of_foreign_errors_do_not_leave_the_user(caplog):
    with caplog.at_level(logging.WARNING, "fbnll"):
        five().ask_all(misbehave, {"how": "an error that quotes"})
    assert "user 1: ValueError" in caplog.text
    assert "secret" not in caplog.text


def test_a_user_with_another_feature_map_refuses(caplog):
    users = [user(k) for k in range(K)]
    users[2] = user(2, features={"clustering": (np.zeros((4, d), np.float32), "Φ2")})
    fed = federation(InProcess(users), K=K, C=C, phi={"clustering": (d, "Φ1")})
    assert sorted(fed.ask_all(describe)) == [0, 1, 3, 4]
    assert "Φ must be the server's, Φ1, but this user's is Φ2" in caplog.text


def test_randomness_depends_on_the_user_the_job_and_how_often_it_was_asked_alone():
    fed, backwards = five(), five(seed=0)
    first, second = fed.ask_all(draw, {"n": 3}), fed.ask_all(draw, {"n": 3})
    backwards.ask_all(describe)
    again = backwards.ask(draw, {k: {"n": 3} for k in reversed(range(K))})
    assert all((first[k]["draw"] == again[k]["draw"]).all() for k in range(K))
    values = {float(reply["draw"][0]) for replies in (first, second) for reply in replies.values()}
    assert len(values) == 2 * K
    other = federation(InProcess([user(0, seed=1)]), K=1, C=C)
    assert (other.ask_all(draw, {"n": 3})[0]["draw"] != first[0]["draw"]).any()
    assert fed.rng("x", 1).random() == backwards.rng("x", 1).random() != fed.rng("x", 2).random()


@both
@pytest.mark.parametrize(
    ("fault", "counted"),
    [("message lost", [1, 1, 2]), ("reply lost", [1, 1, 2]), ("late", [1, 1, 2]), ("twice", [1, 2, 3]), ("garbled", [1, 1, 2])],
)
def test_a_lost_reply_is_a_lost_ask_and_asking_twice_changes_a_state_once(transport, fault, counted):
    fed = five(transport, lambda inner: Faulty(inner, lambda ask, tries: fault if ask.user == 1 and ask.number == 2 else None))
    replies = [fed.ask_all(count_up).get(1) for _ in range(4)]
    seen = [int(reply["total"]) for reply in replies if reply]
    assert seen == ([1, 2, 3, 4] if fault == "twice" else [1, 2, 3])


def test_a_one_shot_ask_is_tried_again_and_other_asks_are_not():
    lost_first = lambda inner: Faulty(inner, lambda ask, tries: "reply lost" if tries < 3 else None)  # noqa: E731
    assert len(five(wrap=lost_first).ask_all(once)) == K
    with pytest.raises(TooManyMissing, match=r"at most 2 users may be missing, but these are: \[0, 1, 2, 3, 4\]"):
        five(wrap=lost_first).ask_all(describe)


def test_missing_users_are_counted_over_the_whole_federation_whatever_the_size_of_the_ask():
    fed = five(wrap=lambda inner: Faulty(inner, lambda ask, tries: "message lost" if ask.user in (0, 1, 2) else None))
    fed.only([0, 3]).ask_all(describe)
    fed.only([1, 4]).ask_all(describe)
    with pytest.raises(TooManyMissing):
        fed.only([2]).ask_all(describe)


def test_an_older_ask_is_ignored_and_a_state_that_is_gone_is_missing():
    alone = user(0)
    fed = federation(InProcess([alone]), K=1, C=C)
    fed.ask_all(draw, {"n": 1})
    ask = library.Ask(0, draw.mark.name, {"n": 1}, 0, 0, 0, "", "", None)
    with pytest.raises(ValueError, match="asks must come in order"):
        alone.answer(ask)
    with pytest.raises(ValueError, match="state to start from must be kept here"):
        alone.answer(library.Ask(0, draw.mark.name, {"n": 1}, 0, 9, 0, "0.7", "", None))


@pytest.mark.parametrize(
    "name",
    ["os:system", "fbnll.methods.fb_nll:hac", "fbnll.methods.nothing:job", "fbnll.federation:find_job", "fbnll.evaluation:Truth", "", ":"],
)
def test_only_marked_jobs_of_the_library_are_found(name):
    with pytest.raises((ValueError, ModuleNotFoundError)):
        find_job(name)


def test_truth_is_out_of_reach_of_a_job_that_does_not_evaluate(caplog):
    fed = five()
    assert 1 not in fed.ask_all(misbehave, {"how": "truth"})
    assert "AttributeError" in caplog.text


def test_a_checkpoint_of_bytes_puts_a_new_federation_where_the_old_one_was():
    fed = five()
    fed.ask_all(count_up)
    saved = pack(checkpoint(fed, Round(1, np.zeros(K, int), [{"a": np.ones(2)}], {"r": np.ones(2)})))
    fed.ask_all(count_up)
    expected = fed.ask_all(draw, {"n": 2})

    other = five()
    since = resume(other, unpack(saved))
    assert (since.number, since.models[0]["a"].tolist(), since.memory["r"].tolist()) == (1, [1, 1], [1, 1])
    assert other.ask_all(count_up)[0]["total"] == 2
    assert (other.ask_all(draw, {"n": 2})[3]["draw"] == expected[3]["draw"]).all()


def test_a_round_is_frozen():
    clusters = np.zeros(K, int)
    since = Round(0, clusters, [{"a": np.ones(2)}])
    with pytest.raises(ValueError, match="read-only"):
        since.clusters[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        since.models[0]["a"][0] = 2


def test_bytes_are_the_same_on_every_transport():
    counted = []
    for transport in (InProcess, Loopback):
        fed = five(transport)
        fed.ask_all(describe)
        fed.ask_all(shift, {"w": {"a": np.zeros(3, np.float32)}})
        counted.append(fed.server.traffic)
    assert counted[0] == counted[1]


def one_model(fed, since):
    """A method whose number of asks a round differs between clusters."""
    if since is None:
        since = Round(0, np.where(np.isin(np.arange(K), fed.users), 0, -1), [{"a": np.zeros(2, np.float32)}], {"seen": 0})
        yield since
    for t in range(since.number, 3):
        for _ in range(len(fed.users)):
            fed.ask_all(draw, {"n": 1})
        weights = np.isin(np.arange(K), fed.users)[:, None].astype(float)
        (mean,) = fed.mean(shift, {k: {"w": since.models[0]} for k in fed.users}, weights)
        since = Round(t + 1, since.clusters, [mean["w"]], {"seen": t})
        yield since


def test_single_model_methods_run_in_every_cluster_and_their_asks_travel_together():
    m = np.array([0, 1, 0, 1, 1])
    fed = five()
    waves = []
    inner = fed.server.transport.deliver
    fed.server.transport.deliver = lambda asks, limits: (waves.append([ask.user for ask in asks]), inner(asks, limits))[1]
    rounds = list(per_cluster(fed, one_model, m))
    assert [since.number for since in rounds] == [0, 1, 2, 3]
    assert waves[:4] == [[0, 2, 1, 3, 4]] * 3 + [[1, 3, 4]]
    np.testing.assert_array_equal(rounds[-1].models[0]["a"], [3, 3])  # mean label 1 of users 0 and 2, three times
    np.testing.assert_array_equal(rounds[-1].models[1]["a"], [8, 8])
    continued = list(per_cluster(five(), one_model, m, rounds[1]))
    np.testing.assert_array_equal(continued[-1].models[1]["a"], [8, 8])


def test_an_error_in_one_cluster_ends_all_of_them():
    fed = five(wrap=lambda inner: Faulty(inner, lambda ask, tries: "message lost" if ask.user in (1, 3, 4) and ask.number > 2 else None))
    with pytest.raises(TooManyMissing):
        list(per_cluster(fed, one_model, np.array([0, 1, 0, 1, 1])))


def test_failures_are_data():
    assert Failure("x") == Failure("x")
