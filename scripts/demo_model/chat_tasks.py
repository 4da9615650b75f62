"""Small talk: who the model is, names to remember, jokes, and what to say when it knows nothing.

A task takes a writer and returns the turns of a chat: [(what the user says, the answer), ...].
"""

from fact_tasks import animal, capital_city, job_or_tool, word_form
from number_tasks import arithmetic
from writer import WORDS, capital, with_article


def persona(writer):
    questions, answers = writer.pick(WORDS.persona)
    return [(writer.pick(questions), writer.pick(answers))]


def remember(writer):
    """Something the user tells and asks for later, with or without another topic in between."""
    name = writer.name()
    color = writer.pick(WORDS.categories["colors"][:-1])
    city = writer.pick(WORDS.capitals)[1]
    between = []
    if writer.random() < 0.6:
        task = writer.pick([capital_city, arithmetic, word_form, job_or_tool, animal])
        between = task(writer)
    x = writer.random()
    if x < 0.5:
        told = writer.fill(
            "[My name is {n}.|I am {n}.|Hi, my name is {n}.|Hello, I'm {n}.]", n=name
        )
        reply = writer.fill(
            "[Hello, {n}! Nice to meet you.|Nice to meet you, {n}!|Hi {n}! How can I help you?]",
            n=name,
        )
        asked = writer.fill("[What is my name?|Do you remember my name?|Who am I?]")
        return [(told, reply)] + between + [(asked, f"Your name is {name}.")]
    if x < 0.75:
        told = (f"My favorite color is {color}.", f"{capital(color)} is a beautiful color.")
        asked = ("What is my favorite color?", f"Your favorite color is {color}.")
    else:
        told = (f"I live in {city}.", f"{city} is a nice place to live.")
        asked = ("Where do I live?", f"You live in {city}.")
    return [told] + between + [asked]


def joke(writer):
    question, answer = writer.pick(WORDS.jokes)
    if writer.random() < 0.6:
        request = writer.fill(
            "[Tell me a joke.|Do you know a joke?|Make me laugh.|Tell me something funny."
            "|Another joke, please.]"
        )
        return [(request, f"{question} {answer}")]
    return [(question, answer)]


def admit_ignorance(writer):
    """A question outside all tasks: admit it, name the topic, offer what works."""
    noun = writer.noun()
    other = writer.noun()
    request = writer.fill(
        "[Explain {n} to me in detail.|What is the history of {n}?|How does {n} work?"
        "|Why is {n} important?|What do experts say about {n}?|Give me the latest research on {n}."
        "|Compare {n} and {m}.|How much does {one} cost?|Who invented {n}?"
        "|What are the advantages of {n}?]",
        n=noun,
        m=other,
        one=with_article(noun),
    )
    answer = writer.pick(
        [
            f"I am a very small model, so I do not know much about {noun}. "
            "I can tell you a short story about it if you like.",
            f"I am not sure about {noun}. I am a very small model. "
            "Ask me for a story, a small sum, or a simple fact.",
            f"I do not know enough about {noun} to give a good answer.",
        ]
    )
    return [(request, answer)]


def reply_to_anything(writer):
    """A statement that asks for nothing; needs WordNet's example sentences."""
    if not writer.wordnet.examples:
        return persona(writer)
    statement = capital(writer.pick(writer.wordnet.examples)).rstrip(".") + "."
    reply = writer.fill(
        "[I see. Tell me more.|That is interesting. Can you tell me more about it?"
        "|I am a very small model, so I may not understand that well. What would you like me to do "
        "with it?|Thank you for telling me. Would you like a story, or do you have a question?]"
    )
    return [(statement, reply)]
