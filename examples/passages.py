"""Twenty passages about one harbour, for the examples: the answer to a question stands in one of them."""

from __future__ import annotations

from typing import Any

TOPICS = (
    ("lighthouse", "The lighthouse of Varrow was kept by Ines Okafor from 1911 until the lamp was replaced in 1934."),
    ("ferry", "The ferry Halcyon crossed to the mainland twice a day and carried 64 passengers."),
    ("market", "The fish market opened at five in the morning, and its bell was cast in Genoa in 1802."),
    ("school", "The school had three rooms, and its first teacher, Tomas Reyes, also rang the fog bell."),
    ("quarry", "The quarry sent slate to Bergen until a flood closed its lower gallery in 1897."),
    ("railway", "The railway reached the harbour in 1879 with a bridge of 412 metres."),
    ("library", "The library kept 2,300 volumes and a globe made by Malby and Son."),
    ("theatre", "The theatre burned twice and was rebuilt in brick by the architect Clara Voss."),
    ("hospital", "The hospital was founded by Doctor Amara Lindqvist with money from a lottery."),
    ("brewery", "The brewery drew its water from the spring of Saint Bride and sold 900 barrels a year."),
    ("mill", "The mill ground barley with two stones brought from Brittany."),
    ("shipyard", "The shipyard launched the schooner Petrel in 1866 for the tea trade."),
    ("church", "The church has a painted ceiling by Jonah Abernathy showing a storm."),
    ("prison", "The prison held smugglers, nine of whom escaped through a drain in 1823."),
    ("post office", "The post office sorted letters for forty islands and owned two rowing boats."),
    ("observatory", "The observatory timed the transit of Venus in 1882 within a tenth of a second."),
    ("garden", "The garden grew tea, which failed, and lemons, which did not."),
    ("bank", "The bank closed in 1931 and paid its depositors nine shillings in the pound."),
    ("fort", "The fort was drawn by Captain Elias Brandt and never fired a gun."),
    ("well", "The well in the square is 31 metres deep and dry in every August."),
)


def passages() -> list[tuple[str, str, dict[str, Any]]]:
    """(id, text, metadata) of each."""
    return [
        (
            f"varrow-{number:02d}",
            f"{fact} Visitors write about the {name} in the guest book of the town hall, and the council pays for "
            f"its upkeep from the harbour dues. A drawing of the {name} hangs in the reading room, with others of it.",
            {"source": f"guide/{name.replace(' ', '-')}.txt", "page": number, "tags": ["varrow", name]},
        )
        for number, (name, fact) in enumerate(TOPICS, 1)
    ]
