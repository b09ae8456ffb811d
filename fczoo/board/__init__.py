"""Pages for a browser: the page of a report, and the site of the leaderboard."""
