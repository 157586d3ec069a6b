"""Chat examples in the model's own template, made from the permissive corpora: definitions, capitals, sums, tools,
small talk.

They teach the form (turns that end, an empty or a filled think block, tool calls and their answers), not knowledge.
"""

import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import jinja2
import jinja2.ext
import jinja2.sandbox

Message = dict

NAME = "tiny-hybrid"
SYSTEMS = (
    "You are a helpful assistant.",
    "Answer briefly.",
    f"You are {NAME}, a small language model.",
    "Be concise and exact.",
)
CITIES = [
    "Paris",
    "London",
    "Rome",
    "Berlin",
    "Madrid",
    "Vienna",
    "Athens",
    "Oslo",
    "Cairo",
    "Tokyo",
    "Lima",
    "Boston",
    "Chicago",
    "Delhi",
    "Sydney",
    "Dublin",
]
SKIES = ["sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "clear", "stormy"]


def template() -> Callable[..., str]:
    """The chat template: `render(messages, tools=None, add_generation_prompt=False, enable_thinking=True)`."""

    def stop(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "sort_keys": False}
    environment.globals["raise_exception"] = stop
    return environment.from_string((Path(__file__).parent / "chat_template.jinja").read_text()).render


def function(name: str, description: str, **parameters: str) -> dict:
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = (
    function("get_weather", "Get the current weather of a city.", city="The city"),
    function("get_time", "Get the local time of a city.", city="The city"),
    function("calculate", "Evaluate an arithmetic expression.", expression="The expression"),
    function("define", "Look a word up in the dictionary.", word="The word"),
    function("search_docs", "Search the documentation.", query="What to search for"),
)


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def _definition(rng: random.Random, synsets: list) -> tuple[list[Message], str]:
    words, kind, meaning, examples = rng.choice(synsets)
    word = words[0]
    ask = rng.choice(
        (
            "What does '{w}' mean?",
            "Define {w}.",
            "What is the meaning of {w}?",
            "Explain the word {w}.",
            "What is {w}?",
            "define {w}",
        )
    )
    answer = f"{word[0].upper()}{word[1:]} is {_article(kind)} {kind}. It means: {meaning}."
    if examples and rng.random() < 0.7:
        answer += f' For example: "{examples[0]}".'
    if len(words) > 1 and rng.random() < 0.5:
        answer += f" A synonym is {words[1]}."
    return [
        {"role": "user", "content": ask.format(w=word)},
        {"role": "assistant", "content": answer},
    ], f"The user asks what {word} means."


def _which_word(rng: random.Random, synsets: list) -> tuple[list[Message], str]:
    words, kind, meaning, _ = rng.choice(synsets)
    ask = rng.choice((f"Which {kind} means '{meaning}'?", f"What is the word for: {meaning}?"))
    return [
        {"role": "user", "content": ask},
        {"role": "assistant", "content": f"The {kind} is '{words[0]}'."},
    ], f"I look for {_article(kind)} {kind}."


def capitals(synsets: list) -> list[tuple[str, str]]:
    """(place, capital) pairs that WordNet's glosses state."""
    found = []
    for words, kind, meaning, _ in synsets:
        match = re.match(r"the (?:[\w ]+ )?capital (?:and [\w ]+ )?of (?:the )?((?:[A-Z][\w.]+ ?)+)", meaning)
        if match and kind == "noun" and words[0][0].isupper():
            found.append((match[1].strip(), words[0]))
    return found


def _capital(rng: random.Random, pairs: list) -> tuple[list[Message], str]:
    place, city = rng.choice(pairs)
    if rng.random() < 0.25:
        ask, answer = f"{city} is the capital of which place?", f"{city} is the capital of {place}."
    else:
        ask = rng.choice(
            (
                f"What is the capital of {place}?",
                f"Name the capital of {place}.",
                f"Which city is the capital of {place}?",
            )
        )
        answer = f"The capital of {place} is {city}."
    return [
        {"role": "user", "content": ask},
        {"role": "assistant", "content": answer},
    ], f"The capital of {place} is {city}."


def _sum(rng: random.Random) -> tuple[list[Message], str]:
    a, b = rng.randrange(2, 100), rng.randrange(2, 100)
    if rng.random() < 0.6:
        ask, result = rng.choice((f"What is {a} + {b}?", f"Add {a} and {b}.", f"{a} plus {b}?")), a + b
        tens, ones = a // 10 * 10 + b // 10 * 10, a % 10 + b % 10
        thought = f"Tens: {a // 10 * 10} + {b // 10 * 10} = {tens}. Ones: {a % 10} + {b % 10} = {ones}. "
        thought += f"Together: {tens} + {ones} = {result}."
        answer = f"{a} + {b} = {result}."
    else:
        a, b = max(a, b), min(a, b)
        ask, result = rng.choice((f"What is {a} - {b}?", f"Subtract {b} from {a}.", f"{a} minus {b}?")), a - b
        thought = f"{a} - {b // 10 * 10} = {a - b // 10 * 10}. Then {a - b // 10 * 10} - {b % 10} = {result}."
        answer = f"{a} - {b} = {result}."
    return [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}], thought


def _spelling(rng: random.Random, synsets: list) -> tuple[list[Message], str]:
    word = rng.choice(synsets)[0][0].split(" ")[0].lower()
    spelled = "-".join(word)
    if rng.random() < 0.5:
        ask, answer = f"Spell the word {word}.", f"{spelled}."
    else:
        ask, answer = f"How many letters does {word} have?", f"The word {word} has {len(word)} letters."
    return [
        {"role": "user", "content": ask},
        {"role": "assistant", "content": answer},
    ], f"The letters are {spelled}: {len(word)} letters."


def _small_talk(rng: random.Random) -> tuple[list[Message], str]:
    ask, answer = rng.choice(
        (
            ("Hello!", "Hello! How can I help you?"),
            ("Hi", "Hello! What would you like to know?"),
            (
                "Who are you?",
                f"I am {NAME}, a very small language model. I can define words, add small numbers and call tools.",
            ),
            (
                "What can you do?",
                "I can define words, name capitals, add small numbers, spell, and call the tools you give me.",
            ),
            ("How are you?", "I am well, thank you. How can I help you?"),
            ("Thank you!", "You are welcome."),
            ("Thanks, bye.", "Goodbye!"),
            ("Are you a large model?", f"No. I am {NAME}: about thirty million parameters."),
        )
    )
    return [
        {"role": "user", "content": ask},
        {"role": "assistant", "content": answer},
    ], "A short, friendly answer is enough."


def _verse(rng: random.Random, verses: list) -> tuple[list[Message], str]:
    place, text = rng.choice(verses)
    ask = rng.choice((f"What does {place} say?", f"Quote {place}.", f"Read {place} to me."))
    return [
        {"role": "user", "content": ask},
        {"role": "assistant", "content": text},
    ], f"I quote {place} from the King James Version."


def _tool_use(rng: random.Random, synsets: list) -> tuple[list[Message], list[dict], str]:
    kind = rng.choice(("weather", "time", "calculate", "define", "none"))
    tools = list(rng.sample(TOOLS, rng.randrange(2, len(TOOLS) + 1)))
    city = rng.choice(CITIES)
    if kind == "none":
        messages, thought = _small_talk(rng)
        return messages, tools, "No tool is needed. " + thought
    if kind == "weather":
        degrees, sky = rng.randrange(-9, 36), rng.choice(SKIES)
        ask = rng.choice(
            (f"What is the weather in {city}?", f"How is the weather in {city} today?", f"Is it {sky} in {city}?")
        )
        name, arguments = "get_weather", {"city": city}
        result, answer = (
            f'{{"temperature": {degrees}, "sky": "{sky}"}}',
            f"In {city} it is {sky} and {degrees} degrees.",
        )
    elif kind == "time":
        clock = f"{rng.randrange(24):02d}:{rng.randrange(60):02d}"
        ask, name, arguments = f"What time is it in {city}?", "get_time", {"city": city}
        result, answer = clock, f"It is {clock} in {city}."
    elif kind == "calculate":
        a, b = rng.randrange(100, 1000), rng.randrange(100, 1000)
        sign = rng.choice("+-*")
        value = {"+": a + b, "-": a - b, "*": a * b}[sign]
        ask, name, arguments = f"What is {a} {sign} {b}?", "calculate", {"expression": f"{a} {sign} {b}"}
        result, answer = str(value), f"{a} {sign} {b} = {value}."
    else:
        words, _, meaning, _ = rng.choice(synsets)
        ask, name, arguments = f"Look up '{words[0]}' in the dictionary.", "define", {"word": words[0]}
        result, answer = meaning, f"'{words[0]}' means: {meaning}."
    if not any(tool["function"]["name"] == name for tool in tools):
        tools.append(next(tool for tool in TOOLS if tool["function"]["name"] == name))
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}
    messages = [{"role": "user", "content": ask}, call]
    if rng.random() < 0.7:
        messages += [{"role": "tool", "content": result}, {"role": "assistant", "content": answer}]
    return messages, tools, f"I call {name}."


def conversations(synsets: list, verses: list, count: int, seed: int) -> Iterator[str]:
    """`count` rendered conversations; the same seed gives the same text."""
    rng, render, pairs = random.Random(seed), template(), capitals(synsets)
    common = [s for s in synsets if s[3]] * 3 + synsets
    for _ in range(count):
        messages, tools = [], None
        if rng.random() < 0.25:
            messages.append({"role": "system", "content": rng.choice(SYSTEMS)})
        thinking = rng.random() < 0.5
        if rng.random() < 0.2:
            turn, tools, thought = _tool_use(rng, common)
            turn[1]["reasoning_content"] = thought if thinking else ""
            messages += turn
        else:
            for _ in range(1 if rng.random() < 0.75 else 2):
                turn, thought = rng.choices(
                    (
                        lambda: _definition(rng, common),
                        lambda: _which_word(rng, common),
                        lambda: _capital(rng, pairs),
                        lambda: _sum(rng),
                        lambda: _spelling(rng, common),
                        lambda: _small_talk(rng),
                        lambda: _verse(rng, verses),
                    ),
                    weights=(40, 12, 10, 14, 8, 8, 8),
                )[0]()
                turn[1]["reasoning_content"] = thought if thinking else ""
                messages += turn
        yield render(messages=messages, tools=tools)
