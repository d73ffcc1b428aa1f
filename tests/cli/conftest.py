from tests.ledger_fixtures import fleet, run

__all__ = ["fleet", "run"]
