"""GenEval: rules on boxes by hand and against a transcription; networks against raw outputs of tiny random ones."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from torch.nn.functional import normalize
from torch.testing import assert_close
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPProcessor,
    DetrConfig,
    DetrForObjectDetection,
    DetrImageProcessor,
    ResNetConfig,
)

from flowrl.rewards import Media
from flowrl.types import Prompt
from flowrl_rewards._objects import ClipPainter, Detr, Found
from flowrl_rewards.geneval import GenEval, judged, kept, relations
from tests.either import byte_tokenizer
from tests.reference import geneval as reference

A, B, C, FAR = (0, 0, 10, 10), (20, 0, 30, 10), (40, 0, 50, 10), (60, 40, 80, 60)


def want(name, count=1, **more):
    return {"class": name, "count": count, **more}


def paint(colours):
    """A painter that knows the colour of every box."""
    return lambda boxes, name: [colours[box] for box in boxes]


# rules by hand

CASES = {
    "there": ({"dog": [A]}, [want("dog")], {}, 1, 1),
    "not there": ({"cat": [A]}, [want("dog")], {}, 0, 0),
    "one of two": ({"dog": [A]}, [want("dog"), want("cat")], {}, 0.5, 0),
    "one more": ({"dog": [A, B, C]}, [want("dog", 2)], {}, 0.5, 1),
    "twice as many": ({"dog": [A, B]}, [want("dog")], {}, 0, 1),
    "four times as many is no debt": ({"dog": [A, B, C, FAR], "cat": [A]}, [want("dog"), want("cat")], {}, 0.5, 1),
    "too few": ({"dog": [A, B]}, [want("dog", 4)], {}, 0.5, 0),
    "the colour": ({"dog": [A]}, [want("dog", color="red")], {A: "red"}, 1, 1),
    "another colour": ({"dog": [A]}, [want("dog", color="red")], {A: "blue"}, 0.5, 0),
    "one of two in the colour": (
        {"dog": [A, B]},
        [want("dog", 2, color="red")],
        {A: "red", B: "blue"},
        (1 + 0.5) / 2,
        0,
    ),
    "the colour of the surest of two": ({"dog": [B, A]}, [want("dog", color="red")], {A: "blue", B: "red"}, 0, 1),
    "no colour without the object": ({}, [want("dog", color="red")], {}, 0, 0),
    "two colours": (
        {"dog": [A], "cat": [B]},
        [want("dog", color="red"), want("cat", color="blue")],
        {A: "red", B: "green"},
        (1 + 1 + 1 + 0) / 4,
        0,
    ),
    "the relation": ({"cat": [A], "dog": [B]}, [want("cat"), want("dog", position=["right of", 0])], {}, 1, 1),
    "the other relation": (
        {"cat": [A], "dog": [B]},
        [want("cat"), want("dog", position=["left of", 0])],
        {},
        2 / 3,
        0,
    ),
    "a relation to nothing": ({"dog": [B]}, [want("cat"), want("dog", position=["right of", 0])], {}, 1 / 3, 0),
    "a relation to too many": (
        {"cat": [A, C], "dog": [B]},
        [want("cat"), want("dog", position=["right of", 0])],
        {},
        1 / 3,
        1,
    ),
    "a relation to all": (
        {"cat": [A, C], "dog": [B]},
        [want("cat", 2), want("dog", position=["right of", 0])],
        {},
        2 / 3,
        0,
    ),
    "names of COCO": ({"remote": [A]}, [want("tv remote")], {}, 1, 1),
}


@pytest.mark.parametrize(("found", "include", "colours", "score", "strict"), CASES.values(), ids=CASES.keys())
def test_the_credits_of_boxes(found, include, colours, score, strict):
    assert judged(found, {"include": include}, paint(colours)) == (pytest.approx(score), strict)


@pytest.mark.parametrize(("n", "strict"), [(2, 0), (3, 1), (4, 0)])
def test_counting_excludes_one_more(n, strict):
    asked = {"include": [want("dog", 3)], "exclude": [want("dog", 4)]}
    assert judged({"dog": [A, B, C, FAR][:n]}, asked, paint({})) == (pytest.approx(1 - abs(n - 3) / 3), strict)


@pytest.mark.parametrize(
    ("box", "holds"),
    [
        ((30, 10, 40, 20), {"right of"}),
        ((-10, 10, 0, 20), {"left of"}),
        ((10, -30, 20, -20), {"above"}),
        ((10, 40, 20, 50), {"below"}),
        ((40, 40, 50, 50), {"right of", "below"}),  # (28, 28) of (30, 30): .66 each
        ((50, 20, 60, 30), {"right of"}),  # (38, 8) of (40, 10): .92 and .19
        ((12, 10, 22, 20), set()),  # 2 apart, and the sizes leave 0.1 (10 + 10) free
        ((14, 10, 24, 20), set()),  # 4 apart, of which 2 count: not above one half
        ((14.1, 10, 24.1, 20), {"right of"}),
        ((10, 10, 20, 20), set()),
    ],
    ids=["right", "left", "above", "below", "diagonal", "mostly right", "near", "at one half", "beyond", "same place"],
)
def test_the_relation_of_a_box_to_one_at_10_to_20(box, holds):
    assert relations(box, (10, 10, 20, 20)) == holds


def test_boxes_are_kept_above_the_threshold_the_surest_first_and_16_of_a_class():
    seen = [Found("dog", score, A) for score in (0.3, 0.2)] + [Found("cat", 0.5, A), Found("cat", 0.7, B)]
    seen += [Found("cup", 0.31 + row / 100, (row, 0, row + 1, 1)) for row in range(20)]
    boxes = kept(seen, 0.3)
    assert boxes["cat"] == [B, A] and "dog" not in boxes
    assert boxes["cup"] == [(row, 0, row + 1, 1) for row in range(19, 3, -1)]


# the transcription

NAMES, HUES = ["dog", "cat", "mouse"], ["red", "blue"]
places = st.tuples(*[st.integers(0, 8)] * 2, *[st.integers(1, 6)] * 2).map(
    lambda b: (b[0], b[1], b[0] + b[2], b[1] + b[3])
)
objects = st.lists(st.tuples(st.sampled_from(NAMES), st.floats(0.2, 1), places), max_size=7, unique_by=lambda o: o[1])


@st.composite
def metadata(draw):
    include = []
    for row in range(draw(st.integers(1, 3))):
        more = {"color": draw(st.sampled_from(HUES))} if draw(st.booleans()) else {}
        if row and draw(st.booleans()):
            more["position"] = [draw(st.sampled_from(["left of", "right of", "above", "below"])),
                                draw(st.integers(0, row - 1))]  # fmt: skip
        name = draw(st.sampled_from(["dog", "cat", "computer mouse"]))
        include.append(want(name, draw(st.integers(1, 3)), **more))
    exclude = [want(include[0]["class"], include[0]["count"] + 1)] if draw(st.booleans()) else []
    return {"tag": draw(st.sampled_from(["counting", "position"])), "include": include, "exclude": exclude}


@given(objects=objects, asked=metadata())
def test_the_rules_are_those_of_the_transcription(objects, asked):
    def colour_of(box, name):
        return HUES[sum(box) % 2]

    threshold = 0.9 if asked["tag"] == "counting" else 0.3
    found = kept([Found(*one) for one in objects], threshold)
    score, strict = judged(found, asked, lambda boxes, name: [colour_of(box, name) for box in boxes])
    assert score == pytest.approx(reference.score(objects, asked, colour_of))
    assert strict == reference.strict(objects, asked, colour_of)


# the scorer, with stand-ins for the networks


@pytest.fixture
def scorer(monkeypatch):
    """One that finds two dogs, of scores .95 and .5, and a remote in every picture, all blue."""

    class Stub:
        names = frozenset({"dog", "cat", "remote"})

        def __call__(self, media):
            return [[Found("dog", 0.5, B), Found("dog", 0.95, A), Found("remote", 0.4, FAR)] for _ in media.images]

    monkeypatch.setattr(GenEval, "_detector", Stub())
    monkeypatch.setattr(GenEval, "_painter", lambda self, picture, boxes, name: ["blue"] * len(boxes))
    return GenEval


def grey(n):
    return Media(torch.full((n, 3, 64, 96), 127, dtype=torch.uint8))


def test_the_tag_counting_has_a_threshold_of_its_own(scorer):
    tags = ("two_object", "counting", "two_object", "colors")
    includes = ([want("dog", 2)], [want("dog")], [want("dog"), want("tv remote")], [want("dog", 2, color="blue")])
    prompts = [
        Prompt(i, "", {"tag": tag, "include": include})
        for i, (tag, include) in enumerate(zip(tags, includes, strict=True))
    ]
    assert scorer.columns == ("score", "strict")
    assert_close(scorer()(grey(4), prompts), torch.tensor([[1.0, 1], [1, 1], [0.5, 1], [1, 1]]))
    low = scorer(counting_threshold=0.4)(grey(1), prompts[1:2])
    assert_close(low, torch.tensor([[0.0, 1]]))


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"include": [want("dgo")]}, "prompt 7 asks for the class 'dgo', which is unknown; write dog"),
        ({"include": [want("kite")]}, "the class 'kite', which is unknown; write one of cat, dog, remote"),
        ({"include": [want("dog")], "exclude": [want("cta")]}, "the class 'cta', which is unknown; write cat"),
        ({"include": [want("dog", color="blu")]}, "the color 'blu', which is unknown; write blue"),
        ({"include": []}, r"prompt 7 has include = \[\]; write at least one class"),
        ({"include": [want("dog", 0)]}, "prompt 7 has include = .*'count': 0"),
    ],
    ids=["near class", "far class", "excluded class", "colour", "nothing", "none of it"],
)
def test_what_cannot_be_judged_is_refused(scorer, asked, told):
    with pytest.raises(ValueError, match=told):
        scorer()(grey(1), [Prompt(7, "", {"tag": "colors", **asked})])


@pytest.mark.parametrize("key", ["threshold", "counting_threshold"])
def test_wrong_options_are_refused(key):
    with pytest.raises(ValueError, match=f"reward geneval: {key} is 30"):
        GenEval(**{key: 30})


# the networks


@pytest.fixture(scope="module")
def detector(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("detector")
    stages = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1], layer_type="basic",
                          out_features=["stage4"])  # fmt: skip
    config = DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone_config=stages,
        d_model=16,
        num_queries=6,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        init_std=0.5,
        id2label={0: "dog", 1: "cat", 2: "remote"},
    )
    network = DetrForObjectDetection(config)
    last = network.bbox_predictor.layers[-1]
    last.weight.data *= 0.1
    last.bias.data = torch.tensor([1.0, -1.0, 2.0, 2.0])  # beyond the upper right corner
    network.save_pretrained(folder)
    DetrImageProcessor(size={"shortest_edge": 64, "longest_edge": 128}).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("clip")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    words = byte_tokenizer(vocab)
    layers = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    last = len(vocab) - 1
    text = {**layers, "vocab_size": len(vocab), "bos_token_id": last - 1, "eos_token_id": last, "pad_token_id": last}
    config = CLIPConfig(text_config=text, vision_config={**layers, "image_size": 32, "patch_size": 8}, projection_dim=8,
                        initializer_factor=4.0)  # fmt: skip
    CLIPModel(config).save_pretrained(folder)
    side = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    CLIPProcessor(CLIPImageProcessor(**side), words).save_pretrained(folder)
    return str(folder)


def noise(n):
    return Media(torch.randint(256, (n, 3, 48, 72), dtype=torch.uint8))


@torch.no_grad()
def test_boxes_are_those_of_the_network_within_the_picture(detector):
    media = noise(1)
    inputs = DetrImageProcessor.from_pretrained(detector)(images=media.pil(), return_tensors="pt")
    raw = DetrForObjectDetection.from_pretrained(detector).eval()(**inputs)
    (found,) = Detr(detector, torch.device("cpu"))(media)
    assert len(found) == 6
    for one, logits, (x, y, w, h) in zip(found, raw.logits[0], raw.pred_boxes[0].tolist(), strict=True):
        odds = logits.softmax(0)[:-1]  # the last is "no object"
        assert one.name == ["dog", "cat", "remote"][int(odds.argmax())] and one.score == pytest.approx(
            odds.max().item()
        )
        edges = (max(x - w / 2, 0) * 72, max(y - h / 2, 0) * 48, min(x + w / 2, 1) * 72, min(y + h / 2, 1) * 48)
        assert one.box == pytest.approx(edges, abs=1e-3)
    assert any(one.box[2] == 72 for one in found) and any(one.box[1] == 0 for one in found)


@torch.no_grad()
def test_a_colour_is_the_one_whose_descriptions_are_nearest_to_the_cut_out(clip):
    (picture,) = noise(1).pil()
    for hue, corner in (("red", (0, 0)), ("blue", (36, 0)), ("white", (0, 24))):
        picture.paste(hue, (*corner, corner[0] + 36, corner[1] + 24))
    media = Media(torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None])
    boxes = [
        (0.5, 2.2, 30.0, 20.7),
        (38.2, 0.0, 72.0, 20.0),
        (1.0, 26.9, 31.0, 47.0),
        (5.0, 5.0, 60.0, 45.0),
        (7.1, 7.1, 7.3, 7.3),
    ]
    network, prepare = CLIPModel.from_pretrained(clip).eval(), CLIPProcessor.from_pretrained(clip)
    found = ClipPainter(clip, torch.device("cpu"))(media, boxes, "dog")
    colours = ["red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white"]
    for box, colour in zip(boxes, found, strict=True):
        edges = (math.floor(box[0]), math.floor(box[1]), math.ceil(box[2]), math.ceil(box[3]))
        cosines = []
        for one in colours:
            texts = [f"a photo of a {one} dog", f"a photo of a {one}-colored dog", f"a photo of a {one} object"]
            inputs = prepare(text=texts, images=picture.crop(edges), padding=True, return_tensors="pt",
                             input_data_format="channels_last")  # fmt: skip
            raw = network(**inputs)
            cosines.append(normalize(raw.text_embeds.mean(0), dim=0) @ raw.image_embeds[0])
        assert colour == colours[int(torch.stack(cosines).argmax())]
    assert len(set(found)) > 1


def test_a_batch_may_be_split_and_permuted(detector, clip, steady):
    includes = (
        [want("dog", 2, color="red")],
        [want("cat"), want("remote", position=["above", 0])],
        [want("remote", 3)],
    )
    prompts = [Prompt(i, "", {"tag": "colors", "include": include}) for i, include in enumerate(includes)]
    steady(GenEval(detector=detector, clip=clip, threshold=0.01), noise(3), prompts)


def test_the_gold_canvas_is_empty(detector, clip):
    scorer = GenEval(detector=detector, clip=clip, threshold=1.0)
    gold = scorer.gold()
    assert torch.equal(scorer(gold.media, gold.prompts), gold.lower) and torch.equal(gold.lower, gold.upper)


def test_what_is_missing_is_named(detector, clip):
    assert not GenEval(detector=detector, clip=clip).missing()
    first, second = GenEval(detector="no/such", clip="./nowhere").missing()
    assert "detector = no/such" in first and "clip = ./nowhere" in second
