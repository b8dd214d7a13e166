"""Pipeline schedules as plain data, their simulator, and the tables that engines carry out."""
