"""The real machine and policies with simulated workers in virtual time, on seeded random schedules."""
