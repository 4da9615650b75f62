"""Tasks about longer texts: stories, questions on them, poems, letters, descriptions.

A task takes a writer and returns the turns of a chat: [(what the user says, the answer), ...].
"""

from stories import THEMES, character, story, story_question
from writer import WORDS, capital, with_article


def tell_story(writer):
    told = story(writer)
    text = told.text if writer.random() < 0.6 else f"{told.title}\n\n{told.text}"
    topic = writer.pick(THEMES[told.theme]["topics"]).format_map(told.slots)
    request = writer.fill(
        "[Tell me|Write|Please write|Can you tell me|Write me|I want to hear|Make up] "
        "[a story|a short story|a little story|a bedtime story|a fairy tale]"
    )
    request += story_wish(writer, told.slots, topic)
    request += "?" if request.startswith("Can") else writer.pick([".", ".", "", "!"])
    turns = [(request, text)]
    if writer.random() < 0.35:
        turns.append(story_question(writer, told))
    if writer.random() < 0.15:
        request = writer.fill("[What is a good title for this story?|Give the story a title.]")
        turns.append((request, told.title))
    return turns


def story_wish(writer, slots, topic):
    """What the story should be about, as the end of the request."""
    x = writer.random()
    if x < 0.15:
        return ""
    if x < 0.40:
        return " about {K}".format_map(slots)
    if x < 0.58:
        return " about {K} named {N}".format_map(slots)
    if x < 0.78:
        return f" about {topic}"
    if x < 0.9:
        return " about {N} and {FN}".format_map(slots)
    return " about {K} and ".format_map(slots) + topic


def read_story(writer):
    told = story(writer)
    num_more = writer.randint(0, 2)
    question, answer = story_question(writer, told)
    request = writer.fill(
        "[Read the story and answer the question.|Answer the question about this text."
        "|Here is a story.]\n\n"
    )
    more = [story_question(writer, told) for _ in range(num_more)]
    return [(f"{request}{told.text}\n\n{question}", answer)] + more


def story_of_any_noun(writer):
    noun = writer.noun()
    told = story(writer, ("lost", "broken"))
    request = writer.fill(
        "[Write|Tell me] a [short |]story about {noun}[.||!]", noun=with_article(noun)
    )
    return [(request, told.text.replace(told.slots["obj"], noun))]


def poem(writer):
    topic = writer.pick(WORDS.poem_topics)
    couplets = writer.sample(WORDS.poem_couplets, writer.randint(2, 4))
    lines = [line.replace("{t}", topic) for couplet in couplets for line in couplet]
    request = writer.fill(
        "[Write|Write me|Can you write] a [short |little |]poem about {topic}[.|]", topic=topic
    )
    return [(request, "\n".join(lines))]


LETTERS = [
    (
        "to say thank you for {gift}",
        "Thank you very much for {gift}. It made me very happy. I hope to see you soon.",
    ),
    (
        "to invite {to} to {event}",
        "I would like to invite you to {event} on {day}. It starts at {hour} o'clock. "
        "I hope you can come.",
    ),
    (
        "to say sorry for being late",
        "I am sorry that I was late. I missed the bus. I will be on time next time.",
    ),
    (
        "to ask for help with {work}",
        "I need some help with {work}. Do you have time on {day}? It would be very kind of you.",
    ),
]


def letter(writer):
    to = writer.name()
    sender = writer.name()
    purpose, body = writer.pick(LETTERS)
    thing = "the " + writer.pick(WORDS.objects)
    gifts = [thing, "the lovely dinner", "your help", "the nice letter"]
    events = ["my birthday party", "a dinner", "a picnic", "a concert", "a game night"]
    works = ["my homework", "the garden", "moving a table", "a math problem", "my computer"]
    slots = {
        "to": to,
        "gift": writer.pick(gifts),
        "event": writer.pick(events),
        "day": writer.pick(WORDS.categories["days of the week"]),
        "hour": writer.randint(1, 11),
        "work": writer.pick(works),
    }
    purpose = purpose.format_map(slots)
    if writer.random() < 0.5:
        request = writer.fill("Write a short [email|letter|note|message] to {to} ", to=to)
        request += purpose + writer.fill("[.| from {sender}.]", sender=sender)
    else:
        request = f"Write a note from {sender} to {to} {purpose}."
    return [(request, f"Dear {to},\n\n{body.format_map(slots)}\n\nBest wishes,\n{sender}")]


def describe(writer):
    thing = writer.pick(WORDS.objects)
    place, the = writer.pick(WORDS.places)
    if writer.random() < 0.5:
        return [describe_place(writer, place, the)]
    return [describe_character(writer, place, thing)]


def describe_place(writer, place, the):
    request = writer.fill("Describe {the}[ in a few sentences|].", the=the)
    answer = writer.fill(
        "{The} lies {place}. [It is a calm and friendly place.|The air is fresh and the light is "
        "soft.|Many small paths lead through it.] {weather} [People come here to rest.|Children "
        "like to play here.|You can hear {sound}.] [In the evening everything turns gold.|At night "
        "it is very quiet.|It is a good place to think.]",
        The=capital(the),
        place=place if the not in place else "far away from the noise of the world",
        weather=writer.pick(WORDS.weathers),
        sound=writer.pick(["the water", "the birds", "the wind", "bells far away"]),
    )
    return request, answer


def describe_character(writer, place, thing):
    who = character(writer)
    request = writer.fill(
        "[Describe a character named {N}.|Invent a character named {N}.]", N=who["N"]
    )
    answer = writer.fill(
        "{N} is {K}. {He} is {trait} and [has a warm smile|always carries a {thing}|walks with "
        "quick steps]. {N} lives {place}. {He} loves {love} and is afraid of {fear}.",
        **who,
        thing=thing,
        place=place,
        love=writer.pick(WORDS.loves),
        fear=writer.pick(WORDS.fears)[0],
    )
    return request, answer
