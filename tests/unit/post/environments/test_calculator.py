"""Calls of the calculator: results are the environment's tokens, and sampled ones stay as drawn."""

import json

import pytest

from mjax.data.base.chat_ids import answer_ends
from mjax.data.base.tokenizer import load_tokenizer
from mjax.errors import UserError
from mjax.post.environments.chat_tokens import ChatTokens, template_beside
from mjax.post.environments.environment import make_environment
from mjax.post.environments.workers import EnvironmentWorkers
from tests.chats import END as IM_END
from tests.chats import START, write_tokenizer
from tests.unit.post.environments.places import answer, over_bytes, text_of


def test_an_episode_goes_on_after_a_call_and_is_paid_at_its_end():
    environment = over_bytes("calculator", question="{problem}=")
    turn = environment.reset(0, 4)
    problem = text_of(turn).removesuffix("=")
    called = answer(environment, turn, f"let me see <calc>{problem}</calc>\n")
    assert not called.is_done and json.loads(json.dumps(called.state)) == called.state
    result = text_of(called).removeprefix("<result>").removesuffix("</result>\n")
    assert int(result) == eval(problem)  # its own prompt
    right = answer(environment, called, f"it is\n{result}")
    assert right.reward == 1 and right.metrics == {"correct": 1.0, "calls": 1.0}
    assert answer(environment, called, "0.5").reward == 0
    middle = answer(environment, turn, f"<calc>{problem}</calc> so\n{result}")
    assert middle.reward == 1 and middle.metrics["calls"] == 0  # that was no call


def test_calls_are_bounded_and_nonsense_has_a_result_too():
    environment = over_bytes("calculator", calls=2)
    turn = environment.reset(0, 0)
    for text, result in [("7/2", "3.5"), ("9**9", "error: 9 ** 9 is not + - * /")]:
        turn = answer(environment, turn, f"<calc>{text}</calc>")
        assert text_of(turn) == f"<result>{result}</result>\n"
    last = answer(environment, turn, "<calc>1</calc>")
    assert last.reward == 0 and last.reason == "too many calls"


@pytest.fixture
def chat(tmp_path):
    place = write_tokenizer(tmp_path / "t")
    tokenizer, template = load_tokenizer(place), template_beside(place)
    return ChatTokens(tokenizer, tuple(answer_ends(tokenizer, template)), template)


def test_turns_of_a_chat_are_those_of_its_template(chat):
    whole = chat.tokenizer.decode_whole
    assert whole(chat.prompt("{a}+1", a=2)) == f"{START}user\n2+1{IM_END}\n{START}assistant\n"
    end = chat.tokenizer.id_of(IM_END)
    drawn = [*chat.tokenizer.encode("x"), end]
    opened = f"\n{START}user\n84{IM_END}\n{START}assistant\n"
    assert whole(chat.reply("84", drawn)) == opened
    assert whole(chat.reply("84", drawn[:-1])) == IM_END + opened  # cut: the template ends it
    assert chat.text(drawn) == chat.text(drawn[:-1]) == "x"
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "x"}]
    said.append({"role": "user", "content": "84"})
    joined = [*chat.prompt("q"), *drawn, *chat.reply("84", drawn)]
    assert whole(joined) == chat.template.render(said)


def test_plain_text_has_a_prefix_once_and_no_template(chat):
    environment = make_environment(
        "arithmetic", chat.tokenizer, chat.end_ids, template=chat.template, plain=True
    )
    turn = environment.reset(0, 0)
    assert turn.ids[: len(chat.tokenizer.prefix)] == chat.tokenizer.prefix != ()
    assert environment.chat.reply("84", [1]) == tuple(chat.tokenizer.encode("84"))


def test_workers_find_the_template_of_a_folder_and_its_end_tokens(tmp_path):
    place = write_tokenizer(tmp_path / "t")
    tokenizer = load_tokenizer(place)
    for plain in (False, True):
        with EnvironmentWorkers("arithmetic", place, args={"plain": plain}) as workers:
            workers.submit(0, "reset", 0, 0)
            ((_, turn),) = workers.ready()
            text = tokenizer.decode_whole(turn.ids)
            assert text.startswith(f"{START}user\n") is not plain
            workers.submit(1, "step", turn.state, [*tokenizer.encode(turn.state), tokenizer.eod_id])
            assert workers.ready()[0][1].reward == 1


def test_a_template_is_found_beside_its_tokenizer_or_there_is_none(tmp_path):
    assert template_beside("byte") is None
    assert template_beside(write_tokenizer(tmp_path / "plain", template=None)) is None
    folder = tmp_path / "chat"
    write_tokenizer(folder)
    assert template_beside(folder / "tokenizer.json").source == template_beside(folder).source
    (folder / "tokenizer_config.json").write_text('{"chat_template": 5}')
    with pytest.raises(UserError, match="chat_template is neither a text"):
        template_beside(folder)


def test_a_template_that_leaves_out_answers_is_one_line(tmp_path):
    place = write_tokenizer(
        tmp_path / "t", "{% for m in messages[-1:] %}{{ m.content }}{% endfor %}"
    )
    chat = ChatTokens(load_tokenizer(place), (), template_beside(place))
    with pytest.raises(UserError, match="the chat template leaves out answers; mend it"):
        chat.reply("84", [1])
