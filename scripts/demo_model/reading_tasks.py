"""Small worlds of two to four facts with questions about them.

A task takes a writer and returns the turns of a chat: [(what the user says, the answer), ...].
"""

from writer import WORDS, with_article


def read_facts(writer):
    """State the facts, then ask; only the first question carries the text."""
    count = writer.randint(2, 4)
    names = []
    while len(names) < count:
        name = writer.name()
        if name not in names:
            names.append(name)
    facts, questions = WORLDS[writer.randint(0, 4)](writer, names)
    questions = questions[: writer.randint(1, len(questions))]
    text = " ".join(facts)
    question, answer = questions[0]
    if writer.random() < 0.7:
        request = text + writer.pick([" ", "\n", "\n\n"]) + question
    else:
        request = f"{question}\n\nText: {text}"
    return [(request, answer)] + questions[1:]


def rooms(writer, names):
    count = len(names)
    places = writer.sample(WORDS.rooms, count)
    things = writer.sample(WORDS.objects, count)
    facts = [
        writer.fill("{n} is in the {p} with [a|the] {t}.", n=name, p=place, t=thing)
        for name, place, thing in zip(names, places, things)
    ]
    i = writer.randrange(count)
    is_there = f"{names[i]} is in the {places[i]}."
    question = writer.pick(
        [
            (f"Where is {names[i]}?", is_there),
            (f"Who is in the {places[i]}?", is_there),
            (f"Where is the {things[i]}?", f"The {things[i]} is in the {places[i]}."),
            (f"Who has the {things[i]}?", f"{names[i]} has the {things[i]}."),
        ]
    )
    j = writer.randrange(count)
    return facts, [question, (f"And where is {names[j]}?", f"{names[j]} is in the {places[j]}.")]


def colors(writer, names):
    count = len(names)
    shades = writer.sample(WORDS.categories["colors"][:-1], count)
    thing = writer.pick(["hat", "coat", "car", "bicycle", "bag", "door", "ball", "cup"])
    facts = [f"{name} has {with_article(color)} {thing}." for name, color in zip(names, shades)]
    i, j = writer.randrange(count), writer.randrange(count)
    return facts, [
        (f"What color is the {thing} of {names[i]}?", f"The {thing} of {names[i]} is {shades[i]}."),
        (f"Who has the {shades[j]} {thing}?", f"{names[j]} has the {shades[j]} {thing}."),
    ]


def ages(writer, names):
    years = writer.sample(range(5, 90), len(names))
    facts = [f"{name} is {age} years old." for name, age in zip(names, years)]
    i = writer.randrange(len(names))
    questions = [
        (f"How old is {names[i]}?", f"{names[i]} is {years[i]} years old."),
        ("Who is the oldest?", f"{names[years.index(max(years))]} is the oldest."),
        ("Who is the youngest?", f"{names[years.index(min(years))]} is the youngest."),
    ]
    writer.shuffle(questions)
    return facts, questions


def tastes(writer, names):
    count = len(names)
    liked = writer.sample(WORDS.foods + WORDS.categories["drinks"], count)
    facts = [writer.fill("{n} [likes|loves] {f}.", n=n, f=food) for n, food in zip(names, liked)]
    i, j = writer.randrange(count), writer.randrange(count)
    return facts, [
        (f"What does {names[i]} like?", f"{names[i]} likes {liked[i]}."),
        (f"Who likes {liked[j]}?", f"{names[j]} likes {liked[j]}."),
    ]


def week(writer, names):
    count = len(names)
    days = writer.sample(WORDS.categories["days of the week"], count)
    events = writer.sample(WORDS.appointments, count)
    name = names[0]
    facts = [f"On {day}, {name} has {event}." for day, event in zip(days, events)]
    i, j = writer.randrange(count), writer.randrange(count)
    return facts, [
        (f"What does {name} have on {days[i]}?", f"On {days[i]}, {name} has {events[i]}."),
        (f"When does {name} have {events[j]}?", f"{name} has {events[j]} on {days[j]}."),
    ]


WORLDS = (rooms, colors, ages, tastes, week)
