"""What travels comes back as it was, and what is no request or no answer is refused by its id and value."""

import base64
import json
import math
import warnings
from io import BytesIO

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from flowrl import wire
from flowrl.png import from_png_base64, png_base64
from flowrl.wire import Item

NAN = float("nan")


def noise(seed, width=5, height=4):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def over_json(value):
    return json.loads(json.dumps(value, allow_nan=False))


def png(image, form="PNG"):
    file = BytesIO()
    image.save(file, form)
    return base64.b64encode(file.getvalue()).decode()


def request(**changed):
    """A request of one good item, some of whose keys are others; `...` removes one."""
    item = {"id": 0, "prompt": "p", "image": png(noise(0)), "metadata": {}} | changed
    return {"version": 1, "items": [{key: value for key, value in item.items() if value is not ...}]}


# pictures and requests


def test_a_picture_comes_back_pixel_by_pixel():
    again = from_png_base64(png_base64(noise(1)))
    assert again.mode == "RGB" and np.array_equal(np.asarray(again), np.asarray(noise(1)))
    assert png_base64(noise(1)) == png_base64(noise(1).copy())


def test_a_request_comes_back():
    metadata = {"target": [1, {"a": None}], "source": noise(2), "text": "ü\n☂\ud800"}
    items = [Item(0, "a red circle", noise(3), metadata), Item("x", "", noise(4, 1, 1), {}, group=7)]
    again = wire.decode_request(over_json(wire.encode_request(items)))
    assert [(i.id, i.prompt, i.group) for i in again] == [(0, "a red circle", None), ("x", "", 7)]
    assert all(np.array_equal(np.asarray(a.image), np.asarray(b.image)) for a, b in zip(again, items, strict=True))
    source = again[0].metadata["source"]
    assert np.array_equal(np.asarray(source), np.asarray(noise(2)))
    assert {**again[0].metadata, "source": None} == {**metadata, "source": None}


@pytest.mark.parametrize(
    "value", [{1, 2}, object(), NAN, math.inf, np.float32(1)], ids=["set", "object", "NaN", "inf", "numpy"]
)
def test_metadata_that_json_cannot_hold_is_refused_by_its_key(value):
    with pytest.raises(ValueError, match=r"item 3: metadata target = .+ cannot travel as JSON"):
        wire.encode_request([Item(3, "p", noise(0), {"target": value})])


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (None, r"the request is None \(NoneType\)"),
        ([], r"the request is \[\] \(list\)"),
        ({"items": []}, "wanted {\"version\": 1"),
        ({"version": 1, "items": []}, "wanted"),
        ({"version": 2, "items": request()["items"]}, "'version': 2"),
        ({"version": 1, "items": [7]}, r"an item is 7 \(int\)"),
        (request(id=...), "an item is"),
        (request(id=True), "item True has"),
        (request(id=1.0), "an item is"),
        (request(prompt=None), "an item is .*None"),
        (request(metadata=[]), "an item is"),
        (request(group="g"), "item 0 has .*'g'.*wanted an integer `group`"),
        (request(promt="p"), "item 0 has .*'promt'"),
        (request(image="not base64!"), "item 0: 'not base64!' is no picture in base64 PNG"),
        (request(image=png(noise(0), "JPEG")), "item 0: .* is no picture in base64 PNG"),
        (request(image=png(noise(0, 50, 50))[:200]), "item 0: .* is no picture in base64 PNG: image file is truncated"),
        (request(image=png(noise(0).convert("L"))), "item 0: its picture is of mode L, RGB is wanted"),
        (request(metadata={"source": {"png": "zz"}}), "item 0: 'zz' is no picture in base64 PNG"),
        ({"version": 1, "items": request()["items"] * 2}, r"ids \[0\] are given more than once"),
    ],
    ids=["None", "list", "no version", "no item", "version 2", "a number for an item", "no id", "bool id", "float id",
         "no prompt", "metadata no object", "text for a group", "unknown key", "no base64", "JPEG", "cut PNG", "grey",
         "bad source", "repeated id"],
)  # fmt: skip
def test_what_is_no_request_is_refused(body, said):
    with pytest.raises(ValueError, match=said):
        wire.decode_request(body)


@pytest.mark.parametrize(("limit", "told"), [(19, 19), (9, 18)], ids=["above the limit", "above twice the limit"])
def test_pixels_are_limited_as_pillow_says(monkeypatch, limit, told):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    with warnings.catch_warnings(), pytest.raises(ValueError, match=f"item 0: .*limit of {told}"):
        warnings.simplefilter("ignore")
        wire.decode_request(request())  # 5 x 4


# answers


def test_null_is_no_verdict_in_both_directions():
    answer = over_json(wire.encode_scores([0, 1], [[0.0, NAN], [NAN, -2.5]], ["a", "b"]))
    assert [row["score"] for row in answer["scores"]] == [{"a": 0.0, "b": None}, {"a": None, "b": -2.5}]
    assert str(wire.decode_scores(answer, [0, 1], ["a", "b"])) == str([[0.0, NAN], [NAN, -2.5]])
    assert over_json(wire.encode_scores([0], [NAN], ["a"])) == {"scores": [{"id": 0, "score": None}]}


@given(
    rows=st.lists(st.lists(st.floats(allow_infinity=False), min_size=2, max_size=2), min_size=1, max_size=6),
    data=st.data(),
)
@settings(max_examples=30)
def test_scores_come_back_bit_for_bit_in_the_order_of_the_ids(rows, data):
    ids = [f"id {i}" for i in range(len(rows))]
    answer = over_json(wire.encode_scores(ids, rows, ["a", "b"]))
    answer["scores"] = data.draw(st.permutations(answer["scores"]))
    again = wire.decode_scores(answer, ids, ["a", "b"])
    assert np.array_equal(np.array(again), np.array(rows), equal_nan=True)


@pytest.mark.parametrize(
    "value",
    [(1, 0.5), np.array([1, 0.5], np.float32), torch.tensor([[1.0], [0.5]]).half(), [np.int64(1), torch.tensor([0.5])]],
    ids=["tuple", "numpy", "half column", "mixed"],
)
def test_numbers_of_any_kind_travel(value):
    assert wire.encode_scores([0, 1], value, ["score"]) == {"scores": [{"id": 0, "score": 1}, {"id": 1, "score": 0.5}]}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, r"returned None \(NoneType\) for 2 items"),
        (0.7, r"returned 0.7 \(float\)"),
        ([0.7], r"returned \[0.7\] \(list\) for 2 items"),
        ([1, "bad"], r"returned 'bad' \(str\) for item 'b', wanted a finite number"),
        ([1, True], r"returned True \(bool\) for item 'b'"),
        ([1, -math.inf], r"returned -inf \(float\) for item 'b'"),
        ([1, [1, 2]], r"returned \[1, 2\] \(list\) for item 'b'"),
        ([1, 10**400], r"returned 10+.* \(int\) for item 'b'"),
    ],
    ids=["None", "scalar", "short", "text", "bool", "inf", "two numbers", "beyond float"],
)
def test_what_a_scorer_may_not_return_does_not_travel(value, said):
    with pytest.raises(ValueError, match=said):
        wire.encode_scores(["a", "b"], value, ["score"])


def answer(*scores, ids=(0, 1)):
    return {"scores": [{"id": id, "score": score} for id, score in zip(ids, scores, strict=True)]}


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        (None, r"the server answered None"),
        ({"result": []}, "'result'.*wanted {\"scores\""),
        ({"error": {"message": "no model"}}, "no model"),
        ({"error": "no model", **answer(1, 2)}, "no model"),
        ({"scores": [0.5, 0.5]}, r"answered with 0.5 \(float\)"),
        ({"scores": [{"id": 0}]}, "answered with {'id': 0}"),
        (answer(1, ids=[0]), r"gave 1 scores for 2 items, none for the ids \[1\]"),
        (answer(1, 2, ids=[0, 2]), "'id': 2.*wanted a score for an id that was asked"),
        (answer(1, 2, ids=[0, True]), "'id': True.*wanted a score for an id that was asked"),
        (answer(1, 2, ids=[0, "1"]), "'id': '1'.*wanted a score for an id that was asked"),
        (answer(1, 2, 3, ids=[0, 1, 1]), r"answered twice for id 1, the second time 3 \(int\)"),
        (answer(1, "2"), r"answered '2' \(str\) for id 1, wanted a finite number"),
        (answer(1, False), r"answered False \(bool\) for id 1"),
        (answer(1, math.inf), r"answered inf \(float\) for id 1"),
        (answer(1, {"other": 2}), r"answered {'other': 2} \(dict\) for id 1"),
    ],
    ids=["None", "another key", "error in 200", "error beside scores", "bare numbers", "no score", "missing",
         "unknown", "bool id", "id of another type", "repeated", "text", "bool", "inf", "another column"],
)  # fmt: skip
def test_what_is_no_answer_is_refused(given_, said):
    with pytest.raises(ValueError, match=said):
        wire.decode_scores(given_, [0, 1], ["score"])


def test_a_column_that_is_missing_is_refused():
    with pytest.raises(ValueError, match=r"answered 1 \(int\) for id 0, wanted finite numbers for a, b"):
        wire.decode_scores(answer(1, ids=[0]), [0], ["a", "b"])


def test_a_literal_nan_is_no_verdict():
    raw = json.loads('{"scores": [{"id": 0, "score": NaN}]}')
    assert math.isnan(wire.decode_scores(raw, [0], ["score"])[0][0])


def test_pictures_are_refused_before_they_fill_the_memory(monkeypatch):
    monkeypatch.setattr(wire, "MOST_PIXELS", 40)
    items = [Item(row, "", noise(row), {}) for row in range(2)]  # 20 pixels each
    assert len(wire.decode_request(wire.encode_request(items))) == 2
    with pytest.raises(ValueError, match="more than 40 pixels together; send fewer"):
        wire.decode_request(wire.encode_request([*items, Item(2, "", noise(0, 1, 1), {})]))
