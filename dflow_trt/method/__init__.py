"""The method, readable in one sitting: draft, verify, accept, relay. Numpy alone."""
