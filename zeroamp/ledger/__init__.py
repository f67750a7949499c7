"""The dtype ledger: `explain` builds it, and `Ledger.verify` compares it with one observed step."""
