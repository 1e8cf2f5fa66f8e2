"""Any layout to any layout: which bytes go where. Integers only."""
