"""Parts of a generated function: names, conditions and mapped values, each with the words that describe it.

In: a random generator. Out: code fragments formatted as `ast.unparse` writes them, with words for the docstring.

Source: report §2 (training problems must be decidable from what the agent sees); rows T1 E6.
Choice: code and docstring come from one draw, with synonyms, so that the text alone decides what the code should do
while no phrase maps to one spelling.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field


def words_of(text: str) -> tuple[str, ...]:
    """A table written as one string."""
    return tuple(text.split())


FUNCTION_NAMES = words_of(
    "f g h q calc pick make check tally handle process get read scan work apply trace run code find"
)
LIST_NAMES = words_of("xs data values seq row arr args names ls")
SECOND_LIST_NAMES = words_of("ys other rest more")
ELEMENT_NAMES = words_of("x n a e y value item num")
RESULT_NAMES = words_of("out res result count acc r t")
INDEX_NAMES = words_of("i j p")
TEXT_NAMES = words_of("s line name string text")
CHAR_NAMES = words_of("c ch")
PARAMETER_NAMES = words_of("k m w size limit")
"""Short names, most of them one token of a small vocabulary, so that prompts stay short."""


@dataclass(kw_only=True, slots=True)
class Scope:
    """Names of one function and the kinds drawn so far; `kinds` becomes the composition key."""

    rng: random.Random
    name: str
    xs: str
    ys: str
    x: str
    out: str
    i: str
    text: str
    char: str
    parameter: str
    allows_parameter: bool
    uses_parameter: bool = False
    kinds: list[str] = field(default_factory=list)

    def say(self, *phrases: str) -> str:
        """One of several ways to say the same."""
        return phrases[int(self.rng.random() * len(phrases))]

    def kind(self, *kinds: str) -> str:
        """Draw a structural choice and note it in the composition."""
        chosen = kinds[int(self.rng.random() * len(kinds))]
        self.kinds.append(chosen)
        return chosen

    def constant(self, low: int, high: int) -> int:
        return low + int(self.rng.random() * (high - low + 1))


def draw_scope(rng: random.Random) -> Scope:
    """Fresh names, all different."""
    taken: set[str] = set()

    def take(pool: tuple[str, ...]) -> str:
        while True:
            name = pool[int(rng.random() * len(pool))]
            if name not in taken:
                taken.add(name)
                return name

    return Scope(
        rng=rng,
        name=take(FUNCTION_NAMES),
        xs=take(LIST_NAMES),
        ys=take(SECOND_LIST_NAMES),
        x=take(ELEMENT_NAMES),
        out=take(RESULT_NAMES),
        i=take(INDEX_NAMES),
        text=take(TEXT_NAMES),
        char=take(CHAR_NAMES),
        parameter=take(PARAMETER_NAMES),
        allows_parameter=rng.random() < 0.35,
    )


def bound(scope: Scope, low: int, high: int) -> tuple[str, str]:
    """A constant, or the extra parameter of the function; the second value is `p` for the parameter, for kind names."""
    if scope.allows_parameter and scope.rng.random() < 0.5:
        scope.uses_parameter = True
        return scope.parameter, "p"
    return str(scope.constant(low, high)), ""


# ---------------------------------------------------------------------------------------------------------------------
# Conditions

COMPARISONS = {
    "gt": (">", ("above", "over", "more than")),
    "ge": (">=", ("at least", "not below", "from")),
    "lt": ("<", ("below", "under", "less than")),
    "le": ("<=", ("at most", "not above", "up to")),
    "eq": ("==", ("equal to", "the same as")),
    "ne": ("!=", ("not equal to", "other than")),
}
NUMBER_CONDITIONS = words_of(
    "gt gt ge ge lt lt le le eq ne even odd div rem between outside positive negative small apart"
)
CHAR_CONDITIONS = words_of("digit letter upper lower vowel notvowel eq ne ge le")
WORD_CONDITIONS = words_of("longer atleast shorter atmost starts ends has hasnot")


def number_condition(scope: Scope, x: str, kind: str) -> tuple[str, str, str]:
    """Code, words and final kind of one simple condition on the number `x`."""
    say = scope.say
    if kind in COMPARISONS:
        operator, phrases = COMPARISONS[kind]
        value, suffix = bound(scope, 1, 8)
        return f"{x} {operator} {value}", f"{say(*phrases)} {value}", kind + suffix
    if kind == "even":
        return f"{x} % 2 == 0", "even", kind
    if kind == "odd":
        return f"{x} % 2 == 1", "odd", kind
    if kind == "div":
        value = str(scope.constant(3, 5))
        return f"{x} % {value} == 0", f"{say('divisible by', 'a multiple of')} {value}", kind
    if kind == "rem":
        divisor, rest = scope.constant(3, 5), scope.constant(1, 2)
        return f"{x} % {divisor} == {rest}", f"{say('leaving', 'with rest')} {rest} modulo {divisor}", kind
    if kind in ("between", "outside"):
        low = scope.constant(0, 4)
        high = low + scope.constant(3, 6)
        if kind == "between":
            return f"{low} <= {x} <= {high}", f"{say('from', 'within')} {low} to {high}", kind
        return f"{x} < {low} or {x} > {high}", f"{say('outside', 'not within')} {low} to {high}", kind
    if kind == "positive":
        return f"{x} > 0", "positive", kind
    if kind == "negative":
        return f"{x} < 0", "negative", kind
    value, suffix = bound(scope, 2, 6)
    size = say("with size", "of size")
    if kind == "small":
        return f"abs({x}) < {value}", f"{size} {say('below', 'under')} {value}", kind + suffix
    return f"abs({x}) >= {value}", f"{size} {say('at least', 'not below')} {value}", kind + suffix


def char_condition(scope: Scope, c: str, kind: str) -> tuple[str, str, str]:
    """Code, words and final kind of one simple condition on the character `c`."""
    say = scope.say
    letter = "abcdeknort"[scope.constant(0, 9)]
    table = {
        "digit": (f"{c}.isdigit()", say("a digit", "numeric")),
        "letter": (f"{c}.isalpha()", say("a letter", "alphabetic")),
        "upper": (f"{c}.isupper()", say("upper case", "a capital")),
        "lower": (f"{c}.islower()", say("lower case", "not a capital letter")),
        "vowel": (f"{c} in 'aeiou'", say("a vowel", "one of aeiou")),
        "notvowel": (f"{c} not in 'aeiou'", say("no vowel", "none of aeiou")),
        "eq": (f"{c} == '{letter}'", f"{say('equal to', 'the same as')} {letter}"),
        "ne": (f"{c} != '{letter}'", f"{say('other than', 'not')} {letter}"),
        "ge": (f"{c} >= '{letter}'", f"{say('at least', 'not before')} {letter}"),
        "le": (f"{c} <= '{letter}'", f"{say('at most', 'not after')} {letter}"),
    }
    return *table[kind], "c" + kind


def word_condition(scope: Scope, w: str, kind: str) -> tuple[str, str, str]:
    """Code, words and final kind of one simple condition on the word `w`."""
    say = scope.say
    letter = "abeost"[scope.constant(0, 5)]
    lengths = {"longer": "gt", "atleast": "ge", "shorter": "lt", "atmost": "le"}
    if kind in lengths:
        operator, phrases = COMPARISONS[lengths[kind]]
        value, suffix = bound(scope, 2, 4)
        return f"len({w}) {operator} {value}", f"of length {say(*phrases)} {value}", "w" + kind + suffix
    table = {
        "starts": (f"{w}.startswith('{letter}')", f"{say('starting', 'that starts')} with {letter}"),
        "ends": (f"{w}.endswith('{letter}')", f"{say('ending', 'that ends')} with {letter}"),
        "has": (f"'{letter}' in {w}", f"{say('with', 'containing')} {letter}"),
        "hasnot": (f"'{letter}' not in {w}", f"{say('without', 'lacking')} {letter}"),
    }
    return *table[kind], "w" + kind


CONDITIONS = {
    "number": (NUMBER_CONDITIONS, number_condition),
    "char": (CHAR_CONDITIONS, char_condition),
    "word": (WORD_CONDITIONS, word_condition),
}


def condition(scope: Scope, x: str, of: str = "number", *, simple: bool = False) -> tuple[str, str]:
    """A condition on `x` as (code, words); about one in four is a composition with and, or, not."""
    kinds, make = CONDITIONS[of]
    draw = scope.rng.random()
    first, words, kind = make(scope, x, kinds[scope.constant(0, len(kinds) - 1)])
    if simple or draw > 0.27:
        scope.kinds.append(kind)
        return first, words
    if draw < 0.05 and " or " not in first and " not in " not in first:
        scope.kinds.append(f"not-{kind}")
        return f"not {first}", f"not {words}"
    second, more, other = make(scope, x, kinds[scope.constant(0, len(kinds) - 1)])
    if " or " in first or " or " in second or second == first or kind == other:
        scope.kinds.append(kind)
        return first, words
    joint = "and" if draw < 0.17 else "or"
    scope.kinds.append(f"{kind}-{joint}-{other}")
    return f"{first} {joint} {second}", f"{words} {joint} {more}"


# ---------------------------------------------------------------------------------------------------------------------
# Values

NUMBER_VALUES = words_of("same same add sub rsub mul square div mod neg abs linear cap raise distance double")
CHAR_VALUES = words_of("same same up low twice wrap")
WORD_VALUES = words_of("same up len first last reversed suffix")


def value(scope: Scope, x: str, of: str = "number", *, kind: str = "") -> tuple[str, str]:
    """A value computed from `x` as (code, words); an operand safe only at the lowest level of an expression."""
    say = scope.say
    if of == "char":
        kind = CHAR_VALUES[scope.constant(0, len(CHAR_VALUES) - 1)]
        scope.kinds.append("m" + kind)
        return {
            "same": (x, x),
            "up": (f"{x}.upper()", f"{x} in {say('upper case', 'capitals')}"),
            "low": (f"{x}.lower()", f"{x} in {say('lower case', 'small letters')}"),
            "twice": (f"{x} + {x}", f"{x} {say('twice', 'doubled')}"),
            "wrap": (f"{x} + '-'", f"{x} {say('and', 'followed by')} a dash"),
        }[kind]
    if of == "word":
        kind = WORD_VALUES[scope.constant(0, len(WORD_VALUES) - 1)]
        scope.kinds.append("m" + kind)
        return {
            "same": (x, x),
            "up": (f"{x}.upper()", f"{x} in {say('upper case', 'capitals')}"),
            "len": (f"len({x})", f"{say('length', 'size')} of {x}"),
            "first": (f"{x}[0]", f"first letter of {x}"),
            "last": (f"{x}[-1]", f"last letter of {x}"),
            "reversed": (f"{x}[::-1]", f"{x} {say('reversed', 'backwards')}"),
            "suffix": (f"{x} + 's'", f"{x} {say('plus', 'followed by')} s"),
        }[kind]
    return number_value(scope, x, kind or NUMBER_VALUES[scope.constant(0, len(NUMBER_VALUES) - 1)])


def number_value(scope: Scope, x: str, kind: str) -> tuple[str, str]:
    """Code and words of one value computed from the number `x`."""
    say = scope.say
    fixed = {
        "same": (x, x),
        "square": (f"{x} * {x}", f"{x} {say('squared', 'times itself')}"),
        "neg": (f"-{x}", f"{say('minus', 'negated')} {x}"),
        "abs": (f"abs({x})", f"{say('size', 'absolute value')} of {x}"),
        "double": (f"{x} + {x}", f"{say('twice', 'double')} {x}"),
    }
    if kind in fixed:
        scope.kinds.append("m" + kind)
        return fixed[kind]
    if kind == "linear":
        factor, offset = scope.constant(2, 4), scope.constant(1, 5)
        scope.kinds.append("mlinear")
        return f"{x} * {factor} + {offset}", f"{factor} times {x} plus {offset}"
    constant, suffix = bound(scope, 2, 7)
    scope.kinds.append("m" + kind + suffix)
    return {
        "add": (f"{x} + {constant}", f"{x} plus {constant}"),
        "sub": (f"{x} - {constant}", f"{x} {say('minus', 'less')} {constant}"),
        "rsub": (f"{constant} - {x}", f"{constant} minus {x}"),
        "mul": (f"{x} * {constant}", f"{x} times {constant}"),
        "div": (f"{x} // {constant}", f"{x} {say('divided by', 'over')} {constant}"),
        "mod": (f"{x} % {constant}", f"{x} modulo {constant}"),
        "cap": (f"min({x}, {constant})", f"{x} {say('capped at', 'but at most')} {constant}"),
        "raise": (f"max({x}, {constant})", f"{x} {say('raised to', 'but at least')} {constant}"),
        "distance": (f"abs({x} - {constant})", f"{say('distance', 'gap')} of {x} to {constant}"),
    }[kind]
