"""Sums, sequences, comparisons and sums told as a little story.

A task takes a writer and returns the turns of a chat: [(what the user says, the answer), ...].
"""

from writer import WORDS, capital

UNITS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen"
).split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
COUNTABLE = ["books", "stones", "coins", "flowers", "pencils", "stickers", "shells", "marbles"]


def in_words(number: int) -> str:
    """A number below 1,000 in words."""
    if number < 20:
        return UNITS[number]
    if number < 100:
        tens, units = divmod(number, 10)
        return TENS[tens - 2] + ("-" + UNITS[units] if units else "")
    hundreds, rest = divmod(number, 100)
    return f"{UNITS[hundreds]} hundred" + (" " + in_words(rest) if rest else "")


def arithmetic(writer):
    x = writer.random()
    a, b = writer.randint(0, 20), writer.randint(0, 20)
    if writer.random() < 0.45:
        a, b = writer.randint(0, 99), writer.randint(0, 99)
    if x < 0.28:
        return [add(writer, a, b)]
    if x < 0.5:
        return [subtract(writer, max(a, b), min(a, b))]
    if x < 0.64:
        return [multiply(writer)]
    if x < 0.72:
        return [divide(writer)]
    if x < 0.78:
        return [spell_out(writer)]
    if x < 0.84:
        return [parity(writer)]
    if x < 0.91:
        return [next_number(writer)]
    return [compare(writer)]


def add(writer, a, b):
    request = writer.fill(
        "[What is {a} plus {b}?|What is {a} + {b}?|{a} + {b} = ?|Add {a} and {b}."
        "|Calculate {a} + {b}.|{a}+{b}]",
        a=a,
        b=b,
    )
    return request, f"{a} + {b} = {a + b}"


def subtract(writer, a, b):
    request = writer.fill(
        "[What is {a} minus {b}?|What is {a} - {b}?|{a} - {b} = ?|Subtract {b} from {a}."
        "|Calculate {a} - {b}.]",
        a=a,
        b=b,
    )
    return request, f"{a} - {b} = {a - b}"


def multiply(writer):
    a, b = writer.randint(0, 12), writer.randint(0, 12)
    request = writer.fill(
        "[What is {a} times {b}?|What is {a} x {b}?|{a} * {b} = ?|Multiply {a} by {b}.]", a=a, b=b
    )
    return request, f"{a} x {b} = {a * b}"


def divide(writer):
    b, quotient = writer.randint(1, 12), writer.randint(0, 12)
    a = b * quotient
    request = writer.fill(
        "[What is {a} divided by {b}?|Divide {a} by {b}.|{a} / {b} = ?]", a=a, b=b
    )
    return request, f"{a} / {b} = {quotient}"


def spell_out(writer):
    largest = 999 if writer.random() < 0.4 else 99
    number = writer.randint(0, largest)
    request = writer.fill(
        "[Write {n} in words.|How do you write {n} in words?|Spell out the number {n}.]", n=number
    )
    return request, capital(in_words(number)) + "."


def parity(writer):
    number = writer.randint(0, 99)
    request = writer.fill("[Is {n} even or odd?|Is the number {n} even or odd?]", n=number)
    return request, f"{number} is {'odd' if number % 2 else 'even'}."


def next_number(writer):
    first, step = writer.randint(0, 30), writer.choice([1, 2, 3, 4, 5, 10])
    shown = ", ".join(str(first + step * i) for i in range(4))
    request = writer.fill("[What comes next: |Continue the sequence: |What is the next number? ]")
    return request + shown + writer.pick([", ...", ""]), f"The next number is {first + step * 4}."


def compare(writer):
    a, b = writer.sample(range(100), 2)
    request = writer.fill(
        "[Which is larger, {a} or {b}?|Which number is bigger: {a} or {b}?]", a=a, b=b
    )
    return request, f"{max(a, b)} is larger than {min(a, b)}."


def told_sum(writer):
    """A sum about things that somebody gets, loses or packs."""
    name = writer.name()
    things = writer.pick(WORDS.foods + COUNTABLE)
    a, b = writer.randint(2, 20), writer.randint(1, 12)
    slots = dict(name=name, other=writer.name(), things=things)
    x = writer.random()
    if x < 0.4:
        return [gain(slots, a, b)]
    if x < 0.75:
        return [loss(writer, slots, max(a, b) + 1, min(a, b))]
    return [boxes(slots, writer.randint(2, 9), writer.randint(2, 9))]


def gain(slots, a, b):
    return (
        "{name} has {a} {things}. {other} gives {name} {b} more. "
        "How many {things} does {name} have now?".format(**slots, a=a, b=b),
        "{name} starts with {a} {things} and gets {b} more. {a} + {b} = {c}. "
        "So {name} has {c} {things} now.".format(**slots, a=a, b=b, c=a + b),
    )


def loss(writer, slots, a, b):
    ways = "gives {b} to {other}|loses {b}"
    if slots["things"] in WORDS.foods:
        ways += "|eats {b}"
    request = "{name} has {a} {things}. {name} [" + ways + "]. How many {things} are left?"
    return (
        writer.fill(request, **slots, a=a, b=b),
        "{name} starts with {a} {things} and then has {b} fewer. {a} - {b} = {c}. "
        "So {c} {things} are left.".format(**slots, a=a, b=b, c=a - b),
    )


def boxes(slots, a, b):
    return (
        "{name} has {a} boxes. There are {b} {things} in each box. "
        "How many {things} are there in total?".format(**slots, a=a, b=b),
        "There are {a} boxes with {b} {things} each. {a} x {b} = {c}. "
        "So there are {c} {things} in total.".format(**slots, a=a, b=b, c=a * b),
    )
