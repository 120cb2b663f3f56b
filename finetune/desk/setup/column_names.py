"""Words of column names, in five languages, and the roles that they tell."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable


def _votes(**words: str) -> dict[str, int]:
    """Returns the weight of each word: `weak` tells a role only with another word."""
    weights = {"sure": 3, "half": 2, "weak": 1}
    return {word: weights[strength] for strength, text in words.items() for word in text.split()}


# English, German, French, Spanish and Chinese, without accents.
_ROLES: dict[str, dict[str, int]] = {
    "prompt": _votes(
        sure="""prompt question query instruction problem inquiry frage anfrage kundenfrage kundenanfrage anweisung
        aufgabe requete demande consigne pregunta consulta instruccion peticion 问题 指令 提问 题目 提示""",
        half="""input user human customer client request eingabe kunde kunden nutzer benutzer entree utilisateur entrada
        cliente usuario 输入 用户 客户""",
        weak="message nachricht mensaje 消息",
    ),
    "completion": _votes(
        sure="completion answer response reply solution antwort losung reponse respuesta solucion 回答 答案 回复",
        half="output assistant agent bot gpt target ausgabe assistent sortie agente salida asistente 输出 助手 客服",
        weak="message nachricht mensaje support 消息",
    ),
    "chosen": _votes(
        sure="""chosen preferred accepted better best winning gewahlt bevorzugt besser prefere choisi elegido preferido
        选中 更好""",
        half="good positive gut bonne buena",
    ),
    "rejected": _votes(
        sure="""rejected dispreferred unpreferred worse worst losing abgelehnt schlechter rejete rechazado 拒绝 更差""",
        half="bad negative schlecht mauvaise mala",
    ),
    "winner": _votes(
        sure="winner gewinner gagnant ganador", half="preferred preference better best choice chosen vote pick"
    ),
    "text": _votes(
        sure="""text body content document article abstract inhalt dokument texte contenu texto contenido documento
        文本 内容 正文""",
        half="paragraph passage story",
    ),
    "label": _votes(sure="label class category sentiment intent kategorie klasse categorie categoria 标签 类别"),
    "context": _votes(
        sure="context passage background kontext contexte contexto 上下文",
        half="""input eingabe entree entrada 输入 document title subject betreff titel titre titulo reasoning thought
        thinking cot rationale explanation""",
    ),
}
_OPPOSITE = {"prompt": "completion", "completion": "prompt"}


def _words_of(text: str) -> frozenset[str]:
    return frozenset(text.split())


_PEOPLE = _words_of(
    """user human customer client kunde kunden nutzer benutzer utilisateur cliente usuario assistant agent bot support
    agente assistent asistente 用户 客户 助手 客服"""
)
# Last words of columns that describe a row, and hold none of its texts.
_ABOUT = _words_of(
    """id ids uid uuid nr no num number index idx key hash type kind source quelle lang language sprache idioma langue
    locale date datum time zeit timestamp created updated url link path file filename split author autor name username
    email score rating csat stars count length len tokens status state model version topic tag tags channel kanal
    category kategorie categorie categoria 编号 来源 语言 日期 类别"""
)
_INSTRUCTIONS = _words_of("instruction anweisung consigne instruccion 指令")
_OPTIONS = _words_of("option options choice choices alternatives")
_SIDES = {"a": "a", "b": "b", "1": "a", "2": "b", "left": "a", "right": "b", "first": "a", "second": "b"}


_SPEAKERS = _words_of("user human customer client assistant gpt bot agent system tool kunde support")


def words(name: str) -> list[str]:
    """Returns the words of a name, without accents: `Customer Message`, `customerMessage` -> [customer, message]."""
    split = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name)
    plain = "".join(one for one in unicodedata.normalize("NFKD", split) if not unicodedata.combining(one)).lower()
    return re.findall(r"[^\W\d_]+|\d+", plain)


def score(name: str, role: str) -> int:
    """Returns how much a name tells a role: 3 or more by a word for it, 2 by half of one; 0 for one about the row."""
    its_words = words(name)
    if role not in ("label", "winner") and its_words and its_words[-1] in _ABOUT:
        return 0
    votes = {one: sum(weights.get(word, 0) for word in its_words) for one, weights in _ROLES.items()}
    against = votes[_OPPOSITE[role]] if role in _OPPOSITE else 0
    return votes[role] - (against if against > 1 else 0)


def best_role(name: str) -> str | None:
    """Returns the role that a name tells best, if it tells one."""
    best = max(_ROLES, key=lambda role: score(name, role))
    return best if score(name, best) >= 2 else None


def side(name: str) -> str | None:
    """Returns a or b for `answer_a`, `Response 2`."""
    its_words = words(name)
    return _SIDES.get(its_words[-1]) if len(its_words) > 1 else None


def may_be_people(name: str) -> bool:
    """Returns whether a name stands for people, who are named or speak in the column."""
    return set(words(name)) <= _PEOPLE


def are_speakers(values: Iterable[str]) -> bool:
    """Returns whether values are roles of a conversation: the rows are its messages then."""
    return {value.strip().lower() for value in values} <= _SPEAKERS


def is_instruction(name: str) -> bool:
    return bool(_INSTRUCTIONS & set(words(name)))


def is_options(name: str) -> bool:
    return bool(_OPTIONS & set(words(name)))
