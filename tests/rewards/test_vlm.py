"""The local judge against raw logits of a tiny random LLaVA, one ask at a time and without padding."""

import json
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from flowrl.rewards import Media
from flowrl.types import Prompt
from flowrl_rewards._judge import Ask
from flowrl_rewards.vlm import VLM, LocalJudge

WORDS = "Yes yes YES No no 0 1 2 3 4 5 a red cube blue sky two what is this Does it show ? . USER : ASSISTANT"
CHAT = (
    "{% for m in messages %}USER: {% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<image>{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endfor %} ASSISTANT:"
)
TEXTS = ["a red cube", "two", "a blue sky", "is it a red cube or is it what it is", "sky"]
LAYOUT = "{images}\n{question} ?"


def _save(folder, chat):
    vocabulary = {word: i for i, word in enumerate(["<unk>", "<pad>", "<s>", "</s>", "<image>", *WORDS.split()])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        additional_special_tokens=["<image>"], model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip
    side = {"height": 16, "width": 16}
    LlavaProcessor(
        CLIPImageProcessor(size=side, crop_size=side), fast, patch_size=8, vision_feature_select_strategy="default",
        num_additional_image_tokens=1, chat_template=chat,
    ).save_pretrained(folder)  # fmt: skip
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    network = LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=CLIPVisionConfig(**small, image_size=16, patch_size=8),
            text_config=LlamaConfig(
                **small, vocab_size=len(vocabulary), num_key_value_heads=2, pad_token_id=1, bos_token_id=2,
                eos_token_id=3,
            ),
            image_token_index=4,
        )
    )  # fmt: skip
    with torch.no_grad():  # fresh weights are so small that every picture gets one answer
        for weight in network.parameters():
            if weight.ndim > 1:
                weight.normal_(std=0.4)
    network.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module", params=[None, CHAT], ids=["plain layout", "chat template"])
def model(request, tmp_path_factory):
    return _save(tmp_path_factory.mktemp("llava"), request.param)


def picture(row, side=20):
    generator = torch.Generator().manual_seed(row)
    return torch.randint(256, (3, side, side), generator=generator, dtype=torch.uint8)


def samples(n=5):
    pictures = torch.stack([picture(row) for row in range(n)])
    sources = [Media(picture(100 + row)[None]).pil()[0] for row in range(n)]
    return Media(pictures), [Prompt(row, TEXTS[row], {"source": sources[row]}) for row in range(n)]


@pytest.fixture(scope="module")
def raw(model):
    """Logits [V] of the first answer token, and the ids of the answer when it is continued greedily."""
    processor, network = AutoProcessor.from_pretrained(model), AutoModelForImageTextToText.from_pretrained(model)
    ids = processor.tokenizer.get_vocab()

    def inputs(question, pictures):
        text = "<image>" * len(pictures) + f"\n{question} ?"
        if processor.chat_template is not None:
            text = "USER: " + "<image>" * len(pictures) + f"{question} ASSISTANT:"
        return processor(text=text, images=pictures, return_tensors="pt")

    @torch.no_grad()
    def first(question, pictures):
        return network(**inputs(question, pictures)).logits[0, -1]

    @torch.no_grad()
    def greedy(question, pictures, steps):
        answered, tokens = network(**inputs(question, pictures), use_cache=True), []
        for _ in range(steps):
            tokens.append(answered.logits[0, -1].argmax().item())
            answered = network(input_ids=torch.tensor([tokens[-1:]]), past_key_values=answered.past_key_values)
        return tokens

    first.greedy, first.ids, first.decode = greedy, ids, processor.tokenizer.decode
    return first


def p_yes(raw, question, pictures):
    logits = raw(question, pictures)
    yes = torch.stack([logits[raw.ids[word]] for word in ("Yes", "yes", "YES")]).logsumexp(0)
    no = torch.stack([logits[raw.ids[word]] for word in ("No", "no")]).logsumexp(0)
    return torch.sigmoid(yes - no)


def judge(model, **options):
    return VLM(model=model, layout=LAYOUT, size=None, device="cpu", **options)


def test_yes_no_is_the_sigmoid_of_the_difference_over_the_spellings(model, raw):
    media, prompts = samples()
    expected = [
        p_yes(raw, f"Does it show {prompt.text}", [image]) for image, prompt in zip(media.pil(), prompts, strict=True)
    ]
    scores = judge(model, questions=["Does it show {prompt}"])(media, prompts)
    torch.testing.assert_close(scores, torch.stack(expected), rtol=1e-4, atol=1e-5)
    assert scores.std() > 0.01  # so that a picture in the wrong row would show


def test_digits_are_the_expectation_over_the_scale(model, raw):
    media, prompts = samples()
    for low, high in ((0, 5), (1, 4)):
        expected = []
        for image, prompt in zip(media.pil(), prompts, strict=True):
            logits = raw(f"what is {prompt.text}", [image])
            p = torch.stack([logits[raw.ids[str(d)]] for d in range(low, high + 1)]).softmax(0)
            expected.append(sum(d * p[d - low] for d in range(low, high + 1)) / high)
        rated = judge(model, questions=["what is {prompt}"], method="digits", low=low, high=high)
        torch.testing.assert_close(rated(media, prompts), torch.stack(expected), rtol=1e-4, atol=1e-5)


def test_the_source_is_shown_before_the_result(model, raw):
    media, prompts = samples(2)
    edited = judge(model, questions=["is it {instruction}"], source=True)
    assert edited.needs == {"source"}
    expected = [
        p_yes(raw, f"is it {prompt.text}", [prompt.metadata["source"], image])
        for image, prompt in zip(media.pil(), prompts, strict=True)
    ]
    torch.testing.assert_close(edited(media, prompts), torch.stack(expected), rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def by_rows(model):
    """The same judge with different numbers of asks a forward."""
    asked = ["Does it show {prompt}", {"text": "is it what ?", "weight": 3}]
    return {rows: judge(model, questions=asked, rows=rows) for rows in (1, 3, 16)}


@given(order=st.permutations(range(5)), rows=st.sampled_from([1, 3]), cut=st.integers(1, 4))
@settings(max_examples=5)
def test_neither_the_order_nor_the_size_of_a_batch_changes_a_score(by_rows, order, rows, cut):
    media, prompts = samples()
    before = media.images.clone()
    straight = by_rows[16](media, prompts)
    permuted = by_rows[rows](media[order], [prompts[row] for row in order])
    parts = [by_rows[16](media[some], [prompts[row] for row in some]) for some in (order[:cut], order[cut:])]
    for other in (permuted, torch.cat(parts)):
        torch.testing.assert_close(other, straight[order], rtol=1e-4, atol=1e-5)
    assert torch.equal(media.images, before)


def test_a_written_answer_is_the_greedy_one_up_to_its_end(model, raw, tmp_path):
    media, prompts = samples(4)
    asks = [Ask((image,), prompt.text) for image, prompt in zip(media.pil(), prompts, strict=True)]
    greedy = [raw.greedy(ask.text, list(ask.pictures), 5) for ask in asks]
    end = greedy[0][3]  # the first answer ends here
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": end}))
    expected = [
        raw.decode(tokens[: tokens.index(end) + 1], skip_special_tokens=True) if end in tokens else None
        for tokens in greedy
    ]
    assert expected[0] is not None and None in expected
    written = LocalJudge(model=str(folder), layout=LAYOUT, size=None, rows=4, max_tokens=5, device="cpu").write(
        asks, {}
    )
    assert written == expected


def test_answers_without_a_token_are_refused(model):
    media, prompts = samples(1)
    with pytest.raises(ValueError, match="has no single token for '6'; give method = 'text'"):
        judge(model, questions=["what"], method="digits", low=1, high=9)(media, prompts)


@pytest.mark.parametrize("size", [None, 7])
def test_pictures_are_shown_in_rgb_at_the_size_asked_for(size):
    grey = Image.fromarray(picture(0)[0].numpy())
    (shown,) = Ask((grey,), "what").shown(size)
    wanted = grey.convert("RGB")
    wanted = wanted if size is None else wanted.resize((size, size), Image.Resampling.BILINEAR)
    assert shown.mode == "RGB" and shown.tobytes() == wanted.tobytes()


@pytest.mark.parametrize(
    ("option", "fix"),
    [
        ({"layout": "{question}"}, "layout = '{question}' lacks {images}"),
        ({"dtype": "int8"}, "dtype = 'int8' is unknown; give 'float32'"),
        ({"size": 0}, "size = 0 is no count"),
        ({"rows": 0}, "rows = 0 is no count"),
        ({"max_tokens": -1}, "max_tokens = -1 is no count"),
        ({"method": "yesno"}, "method = 'yesno' is unknown; give 'yes_no'"),
    ],
    ids=["layout", "dtype", "size", "rows", "max_tokens", "a question's"],
)
def test_a_wrong_option_is_refused_before_anything_is_loaded(option, fix):
    with pytest.raises(ValueError) as caught:
        VLM(model="/nowhere", **option)
    assert fix in str(caught.value)


def test_a_model_that_is_not_here_is_named_and_one_that_is_is_not(model):
    (sentence,) = VLM(model="someone/some-judge").missing()
    assert sentence.startswith("model = someone/some-judge is not on this machine: give a local path")
    assert judge(model).missing() == []


def test_the_usual_question_is_the_published_one():
    (usual,) = VLM().questions
    assert usual.text.format(prompt="two cubes") == 'Does this image match the caption "two cubes"? Answer Yes or No.'


def test_weights_that_lack_a_part_are_refused(model, tmp_path):
    folder = tmp_path / "lacking"
    shutil.copytree(model, folder)
    state = load_file(folder / "model.safetensors")
    lost = next(name for name in state if "vision_tower" in name)
    save_file({name: value for name, value in state.items() if name != lost}, folder / "model.safetensors")
    judge = LocalJudge(model=str(folder), size=16, layout=LAYOUT)
    with pytest.raises(ValueError, match=rf"model = {folder} is no complete .*it lacks .*{lost.split('.')[-2]}"):
        judge.weigh([Ask((Image.new("RGB", (16, 16)),), "two")], (("Yes",), ("No",)))
