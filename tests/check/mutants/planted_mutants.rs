//! Mistakes that were planted in code that had been rewritten, and that no test found at first.

use super::TestMutant;
use super::client_test_mutants::edit;

pub const PLANTED_MUTANTS: &[TestMutant] = &[
    TestMutant {
        name: "fenced-write-keeps-a-ttl",
        edits: &[edit(
            "lua/fenced.lua",
            "redis.call('SET', KEYS[1], value)",
            "redis.call('SET', KEYS[1], value, 'KEEPTTL')",
        )],
        test: "scripts::vectors::vectors_get_their_answers",
    },
    TestMutant {
        name: "batched-calls-are-not-undone",
        edits: &[edit(
            "src/wire/servers/batcher.rs",
            "waiting.retain(|waiting| leaves_queue(&waiting.has_left));",
            "waiting.retain(|waiting| !waiting.has_left.load(Ordering::SeqCst));",
        )],
        test: "standalone::request_queue::calls_that_are_dropped_after_their_batch_was_written_leave_no_lock",
    },
    TestMutant {
        name: "pause-before-a-subscription-stays",
        edits: &[edit("src/wire/subscriber.rs", "                    pause = SUBSCRIBE_PAUSES.0;\n", "")],
        test: "standalone::wakeups::the_ninth_lost_subscription_is_replaced_as_fast_as_the_first",
    },
    TestMutant {
        name: "one-refused-lock-is-an-outage",
        edits: &[
            edit("src/wire/failure.rs", "            _ if !self.is_transient() => None,\n", ""),
            edit(
                "src/wire/failure.rs",
                "Cause::Unsent(_) | Cause::Sent(_) => Some(Ability::Reply),\n            _ => None,",
                "_ => Some(Ability::Reply),",
            ),
        ],
        test: "insight::a_lasting_error_of_one_lock_is_no_outage",
    },
    TestMutant {
        name: "clock-of-one-node-suffices",
        edits: &[edit(
            "src/wire/nodes.rs",
            "if outcomes.iter().filter(|outcome| outcome.is_ok()).count() >= self.deployment.majority() {",
            "if outcomes.iter().any(|outcome| outcome.is_ok()) {",
        )],
        test: "quorum::tokens::quorum_first_token_waits_for_the_clocks_of_a_majority",
    },
    TestMutant {
        name: "overwritten-key-is-no-loss",
        edits: &[edit(
            "src/lease/renewal.rs",
            "        let without = tally.negative.union(tally.refused);",
            "        let without = tally.negative;",
        )],
        test: "wrong_type::existing_keys::a_holder_whose_key_was_overwritten_has_lost_the_lock",
    },
    TestMutant {
        name: "place-of-an-unsent-poll-stays",
        edits: &[edit(
            "src/lease/attempt_guard.rs",
            "            Standing::Asked { is_first: true } if is_withdrawn && !is_unknown => return,",
            "            Standing::Asked { .. } if is_withdrawn && !is_unknown => return,",
        )],
        test: "standalone::request_queue::a_poll_that_was_not_sent_leaves_no_place",
    },
    TestMutant {
        name: "answer-does-not-end-an-outage",
        edits: &[edit(
            "src/lease/progress.rs",
            "        self.has_queued |= is_queued;\n        self.failing_since = None;\n",
            "        self.has_queued |= is_queued;\n",
        )],
        test: "standalone::reconnections::a_call_that_waits_outlasts_several_short_outages",
    },
    TestMutant {
        name: "revoked-before-the-request-arrives",
        edits: &[edit(
            "src/queries.rs",
            "        let _revoked = Revoked(self);",
            "        let _ = Revoked(self);",
        )],
        test: "standalone::revoked_turns::a_hold_that_is_granted_before_its_revocation_arrives_is_not_passed_on",
    },
    TestMutant {
        name: "try-of-all-is-not-undone",
        edits: &[edit("src/lease/acquire.rs", "if in_flight.is_indeterminate() {", "if false {")],
        test: "locks::sets::a_try_without_a_reply_leaves_no_lock",
    },
    TestMutant {
        name: "limit-of-readers-forgotten",
        edits: &[edit("src/options/partial.rs", "                all.set_fields.0 |= set_fields.0;\n", "")],
        test: "options::a_limit_of_readers_for_some_locks_counts_tasks",
    },
    TestMutant {
        name: "new-connection-forgets-what-is-reserved",
        edits: &[edit(
            "src/lease/attempt.rs",
            "token.get() + u64::from(self.spare_tokens())",
            "token.get().max(u64::from(self.spare_tokens()))",
        )],
        test: "standalone::reserved_tokens::a_lease_that_has_reserved_tokens_outlives_its_connection",
    },
    TestMutant {
        name: "missing-replicas-are-not-forgotten",
        edits: &[edit(
            "src/lease/wait_loop.rs",
            "        self.waiter.grant_clock = clock;\n        self.progress.found = Found::Busy;\n",
            "        self.waiter.grant_clock = clock;\n",
        )],
        test: "replicas::confirmation::replicas_standalone_a_call_that_last_found_the_lock_held_has_timed_out",
    },
    TestMutant {
        name: "node-that-failed-late-has-released",
        edits: &[edit(
            "src/lease/release.rs",
            "votes.iter().filter(|(_, outcome)| outcome.is_ok());",
            "votes.iter();",
        )],
        test: "quorum::late_requests::quorum_release_that_a_node_never_got_is_repeated",
    },
    TestMutant {
        name: "partial-grant-of-a-nested-try-stays",
        edits: &[edit(
            "src/lease/wait_loop.rs",
            "AcquireOutcome::NoMajority { .. } => guard.abandon(),",
            "AcquireOutcome::NoMajority { .. } => {}",
        )],
        test: "quorum::refusals::quorum_try_before_the_local_queue_leaves_no_partial_grant",
    },
];
