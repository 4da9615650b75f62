"""Tasks with short answers that are known: facts, words, numbers, definitions, explanations.

A task takes a writer and returns the turns of a chat: [(what the user says, the answer), ...].
"""

from writer import WORDS, capital, listing, lower, with_article

ORDERED = ("months", "days of the week", "planets", "seasons")
COUNTS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight"]
IRREGULAR = (
    "sheep", "mouse", "fox", "wolf", "fish", "salmon", "octopus", "goose", "deer", "butterfly",
)  # fmt: skip
WITHOUT_ARTICLE = ("scissors", "soap")


def name_some(writer):
    """A list of things of one category, as a numbered list, with bullet points or in a row."""
    category = writer.pick(list(WORDS.categories))
    members = WORDS.categories[category]
    count = min(writer.choice([2, 3, 3, 3, 4, 5, 5, 6]), len(members))
    chosen = members[:count] if category in ORDERED else writer.sample(members, count)
    request = writer.fill(
        "[Name|List|Give me|Tell me|Write down] {count} {category}[.|]",
        count=writer.pick([str(count), COUNTS[count]]),
        category=category,
    )
    x = writer.random()
    if x < 0.4:
        ways = [" as a numbered list.", " in a list.", ".", ""]
        lines = [f"{i}. {capital(item)}" for i, item in enumerate(chosen, 1)]
    elif x < 0.6:
        ways = [" as bullet points.", " with bullet points."]
        lines = [f"- {capital(item)}" for item in chosen]
    else:
        return [(request, capital(listing(chosen)) + ".")]
    return [(request.rstrip(".") + writer.pick(ways), "\n".join(lines))]


def capital_city(writer):
    country, city, continent = writer.pick(WORDS.capitals)
    x = writer.random()
    if x < 0.5:
        request = writer.fill(
            "[What is the capital of {country}?|What's the capital of {country}?|Tell me the "
            "capital of {country}.|Do you know the capital of {country}?|{country} capital?]",
            country=country,
        )
        return [(request, f"The capital of {country} is {city}.")]
    if x < 0.75:
        request = writer.fill(
            "[{city} is the capital of which country?|Which country has the capital {city}?]",
            city=city,
        )
        return [(request, f"{city} is the capital of {country}.")]
    request = writer.fill(
        "[On which continent is {country}?|Where is {country}?|Which continent is {country} in?]",
        country=country,
    )
    return [(request, f"{capital(country)} is in {continent}.")]


def animal(writer):
    name, group, sound, young, home, food, num_legs = writer.pick(WORDS.animals)
    x = writer.randint(0, 7)
    one = with_article(name)
    start = capital(one)
    group = with_article(group)
    young = with_article(young)
    legs = f"{COUNTS[int(num_legs)]} legs"
    if x == 7:
        if name in IRREGULAR:
            request = f"Tell me about the {name}."
        else:
            request = writer.fill("[Tell me about|Describe|What do you know about] {n}s.", n=name)
        return [
            (
                request,
                f"{start} is {group}. It lives in {home} and eats {food}. It has {legs}. "
                f"A baby {name} is called {young}.",
            )
        ]
    return [
        [
            (f"What sound does {one} make?", f"{start} {sound}."),
            (f"What is a baby {name} called?", f"A baby {name} is called {young}."),
            (f"Where does {one} live?", f"{start} lives in {home}."),
            (f"What does {one} eat?", f"{start} eats {food}."),
            (f"How many legs does {one} have?", f"{start} has {legs}."),
            (f"What kind of animal is {one}?", f"{start} is {group}."),
            (f"Is {one} {group}?", f"Yes, {one} is {group}."),
        ][x]
    ]


def word_form(writer):
    x = writer.random()
    if x < 0.35:
        return [opposite(writer)]
    if x < 0.6:
        one, many = writer.pick(WORDS.plurals)
        request = writer.fill(
            '[What is the plural of {one}?|What is the plural of "{one}"?|Plural of {one}?]',
            one=one,
        )
        return [(request, f"The plural of {one} is {many}.")]
    base, past, _, _ = writer.pick(WORDS.verbs)
    if writer.random() < 0.7:
        request = writer.fill(
            '[What is the past tense of {base}?|What is the past tense of "{base}"?'
            "|Past tense of {base}?]",
            base=base,
        )
        return [(request, f"The past tense of {base} is {past}.")]
    answer = writer.fill(
        "[Yesterday|Last week|This morning], {name} {past}[ again| too| first|].",
        name=writer.name(),
        past=past,
    )
    return [(f'Use the verb "{base}" in the past tense.', answer)]


def opposite(writer):
    word, other = writer.pick(WORDS.opposites)
    # Some words are the opposite of two others, and can only be asked for.
    is_fixed = (word, other) == ("heavy", "light") or other in ("light", "rough", "open")
    if writer.random() < 0.5 and not is_fixed:
        word, other = other, word
    request = writer.fill(
        '[What is the opposite of {word}?|What is the opposite of "{word}"?|Opposite of {word}?'
        "|Give me the opposite of {word}.]",
        word=word,
    )
    return request, f"The opposite of {word} is {other}."


def job_or_tool(writer):
    if writer.random() < 0.5:
        job, work = writer.pick(WORDS.jobs)
        one = with_article(job)
        is_asked = writer.random() < 0.6
        question = f"What does {one} do?" if is_asked else f"Who {work}?"
        return [(question, f"{capital(one)} {work}.")]
    tool, use = writer.pick(WORDS.tools)
    one = tool if tool in WITHOUT_ARTICLE else with_article(tool)
    return [(f"What do you use {one} for?", f"You use {one} to {use}.")]


def define(writer):
    word, part_of_speech, definition = writer.pick(writer.wordnet.definitions)
    request = writer.fill(
        '[What does "{word}" mean?|What does the word "{word}" mean?|Define {word}.'
        '|Define "{word}".|What is the meaning of {word}?]',
        word=word,
    )
    if part_of_speech != "noun":
        return [(request, f'"{capital(word)}" means: {definition}.')]
    if writer.random() < 0.4:
        request = f"What is {with_article(word)}?"
    return [(request, f'"{capital(word)}" means {definition}.')]


def explain(writer):
    question, answer = writer.pick(WORDS.explanations)
    first_sentence = answer.split(". ")[0].rstrip(".") + "."
    if writer.random() < 0.4 and question.startswith("What is "):
        question = writer.fill(
            "[Explain what {x} is.|Can you explain {x}?|Tell me about {x}.]",
            x=question.removeprefix("What is ").removesuffix("?"),
        )
    x = writer.random()
    if x < 0.2 and question.startswith(("Explain", "Tell")):
        way = writer.pick([" in one sentence.", " briefly."])
        return [(question.rstrip(".?") + way, first_sentence)]
    if 0.2 <= x < 0.35:
        request = writer.fill("[Say it in one sentence.|Make it shorter.|Shorter, please.]")
        return [(question, answer), (request, first_sentence)]
    return [(question, answer)]


def how_to(writer):
    goal, steps = writer.pick(WORDS.howtos)
    x = writer.random()
    request = writer.fill(
        "[How do I {goal}?|How can I {goal}?|How do you {goal}?|Tell me how to {goal}."
        "|Give me the steps to {goal}.]",
        goal=goal,
    )
    if x < 0.6:
        answer = "\n".join(f"{i}. {step}" for i, step in enumerate(steps, 1))
    else:
        answer = "First, " + " Then ".join(lower(step) for step in steps)
    turns = [(request, answer)]
    if writer.random() < 0.3:
        number = writer.randrange(len(steps))
        turns.append((f"What is step {number + 1}?", steps[number]))
    return turns


def python_function(writer):
    purpose, name, parameters, body = writer.pick(WORDS.functions)
    request = writer.fill(
        "[Write|Show me|Give me] a Python function that {purpose}.", purpose=purpose
    )
    return [(request, f"```python\ndef {name}({parameters}):\n    {body}\n```")]
