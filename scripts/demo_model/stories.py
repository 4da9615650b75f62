"""Short stories of one theme and two characters, and questions about them."""

import re
import tomllib
from dataclasses import dataclass

from writer import HERE, WORDS, Writer, capital, lower, with_article

TEMPLATES = tomllib.loads((HERE / "stories.toml").read_text(encoding="utf-8"))
THEMES = TEMPLATES["themes"]


@dataclass(frozen=True)
class Story:
    """A told story: its text, and the slots that questions about it are filled from."""

    theme: str
    title: str
    text: str
    summary: str
    slots: dict[str, str]


def character(writer: Writer, taken: str = "") -> dict[str, str]:
    """Slots that describe a new character, whose name is not `taken`."""
    x = writer.random()
    if x < 0.38:
        names, kinds, genders = WORDS.girls, WORDS.girl_kinds, "f"
    elif x < 0.76:
        names, kinds, genders = WORDS.boys, WORDS.boy_kinds, "m"
    else:
        names, kinds, genders = WORDS.pets, WORDS.animal_kinds, "fm"
    name = writer.pick(names)
    kind = writer.pick(kinds)
    gender = writer.pick(genders) if len(genders) > 1 else genders
    while name == taken:
        name = writer.pick(names)
    he, him, his = ("she", "her", "her") if gender == "f" else ("he", "him", "his")
    trait = writer.pick(WORDS.traits)
    return {
        "N": name,
        "K": with_article(kind),
        "B": kind,
        "he": he,
        "him": him,
        "his": his,
        "He": capital(he),
        "His": capital(his),
        "trait": trait,
        "atrait": with_article(trait),
    }


def story_slots(writer: Writer) -> dict[str, str]:
    """Everything a story template may name, drawn once for the whole story."""
    hero = character(writer)
    friend = character(writer, taken=hero["N"])
    place, the = writer.pick(WORDS.places)
    skill, _ = writer.pick(WORDS.skills)
    fear, cure = writer.pick(WORDS.fears)
    build, material = writer.pick(WORDS.builds)
    noise, cause = writer.pick(WORDS.noises)
    trouble, fix = writer.pick(WORDS.troubles)
    thing = writer.pick(WORDS.objects)
    spots = writer.sample(WORDS.spots, 3)
    landmarks = writer.sample(WORDS.landmarks, 2)
    foods = writer.sample(WORDS.foods, 2)
    if writer.random() < 0.12:
        thing = writer.noun()
    slots = {
        **hero,
        **{"F" + slot: text for slot, text in friend.items()},
        **dict(place=place, the=the, obj=thing, skill=skill, fear=fear, cure=cure),
        **dict(build=build, mat=material, noise=noise, cause=cause, trouble=trouble, fix=fix),
        **dict(spot1=spots[0], spot2=spots[1], spot3=spots[2]),
        **dict(land1=landmarks[0], land2=landmarks[1], food=foods[0], food2=foods[1]),
        "time": writer.pick(WORDS.times),
        "timeofday": writer.pick(["morning", "afternoon", "day"]),
        "dish": writer.pick(WORDS.dishes),
        "game": writer.pick(WORDS.games),
        "seed": writer.pick(WORDS.seeds),
        "contest": writer.pick(WORDS.contests),
        "treasure": writer.pick(WORDS.treasures),
        "love": writer.pick(WORDS.loves),
        "weather": writer.pick(WORDS.weathers),
    }
    slots["cbuild"] = capital("the" + build[1:] if build.startswith("a ") else build)
    return slots | {"Obj": thing.title(), "Sk": skill.title(), "Food": foods[0].title()}


def story(writer: Writer, themes=tuple(THEMES)) -> Story:
    """Tell a story about one of the themes."""
    theme = writer.pick(themes)
    template = THEMES[theme]
    slots = story_slots(writer)
    parts = [writer.fill(part, **slots) for part in (TEMPLATES["opening"], *template["parts"])]
    parts += ending(writer, template["morals"])
    text = "\n\n".join(re.sub(" +", " ", part).strip() for part in parts)
    title = writer.fill(template["title"], **slots | {"B": slots["B"].title()})
    return Story(theme, title, text, template["summary"].format_map(slots), slots)


def ending(writer: Writer, morals: list[str]) -> list[str]:
    """The last paragraph, if the story gets one: its lesson, or a closing formula."""
    x = writer.random()
    if x >= 0.75:
        return []
    if x >= 0.55:
        return [writer.fill("[The end.|And they lived happily.|And that is the end of the story.]")]
    start = writer.fill("[The lesson is simple: |This story shows that |So remember: |]")
    moral = writer.pick(morals)
    if not start:
        return [moral]
    # An imperative cannot follow "shows that".
    if "shows" in start and moral.startswith(("Always", "Look")):
        start = "So remember: "
    return [start + lower(moral)]


def story_question(writer: Writer, told: Story) -> tuple[str, str]:
    """A question about the story and its answer."""
    general = [
        ("Who is the main character?", "The main character is {N}, {K}."),
        ("What is the name of the main character?", "The name of the main character is {N}."),
        ("Who is {FN}?", "{FN} is {FK}."),
        ("Where does {N} live?", "{N} lives {place}."),
        ("What is {N} like?", "{N} is {trait}."),
        ("Summarize the story in one sentence.", told.summary),
        ("What is the story about?", told.summary),
    ]
    # Questions of the theme are asked three times as often as the general ones.
    question, answer = writer.pick(general + THEMES[told.theme]["questions"] * 3)
    return question.format_map(told.slots), answer.format_map(told.slots)
