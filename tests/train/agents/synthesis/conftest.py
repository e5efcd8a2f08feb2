import pytest

from train.agents.synthesis.worlds import Change, Draft, Guard, SqlTool, Verifier, World

TEXT = {"type": "string"}


@pytest.fixture
def shop():
    """A world of three goods, one of which is out of stock."""
    known = Guard(sql="SELECT EXISTS (SELECT * FROM good WHERE name = :good)", error="no such good")
    stocked = Guard(sql="SELECT stock > 0 FROM good WHERE name = :good", error="out of stock")
    return World(
        name="shop-0",
        category="shop",
        script="CREATE TABLE good (name TEXT PRIMARY KEY, price INTEGER, stock INTEGER);"
        "INSERT INTO good VALUES ('pen', 317, 2), ('ink', 925, 1), ('cap', 122, 0);",
        tools=(
            SqlTool(name="list", description="All goods.", result="SELECT name FROM good ORDER BY 1", returns="column"),
            SqlTool(
                name="get", description="A good.", parameters={"good": TEXT}, guards=(known,),
                result="SELECT * FROM good WHERE name = :good", returns="row",
            ),
            SqlTool(
                name="buy", description="Buy one.", parameters={"good": TEXT}, guards=(known, stocked),
                steps=("UPDATE good SET stock = stock - 1 WHERE name = :good",),
            ),
        ),
    )  # fmt: skip


@pytest.fixture
def draft():
    """Buy the cheapest good that is in stock, and say its price."""
    return Draft(
        prompt="Buy the cheapest good that is in stock. What does it cost?",
        solution="""def solve(call):
    rows = [call("get", good=k) for k in call("list")]
    best = min([r for r in rows if r["stock"] > 0], key=lambda r: r["price"])
    call("buy", good=best["name"])
    return best["price"]
""",
        verifier=Verifier(
            answer="317",
            compare="number",
            changes={"good": Change(added=[["pen", 317, 1]], removed=[["pen", 317, 2]])},
        ),
        difficulty=2,
        kind="pick",
    )
