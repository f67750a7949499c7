"""The dtype ledger: `explain`, and `Ledger.verify`, which compares it with one observed step."""
