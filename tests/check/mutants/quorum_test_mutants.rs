//! Mistakes that a named test of the suite must find: in a quorum, behind Sentinel, in options, and
//! with many readers and waiting writers.

use super::test_mutants::MUTEX_FORCE_WITHOUT_GRANT;
use super::{Edit, TestMutant};

pub const QUORUM_TEST_MUTANTS: &[TestMutant] = &[
    TestMutant {
        name: "most-sentinels-believed",
        edits: &[Edit {
            file: "src/wire/servers/sentinel.rs",
            from: "(one.epoch, supporters(one))",
            to: "(supporters(one), one.epoch)",
        }],
        test: "sentinel::two_masters::sentinel_latest_configuration_counts",
    },
    TestMutant {
        name: "accepted-token-forgotten",
        edits: &[Edit {
            file: "src/lease/attempt_guard.rs",
            from: "                    nodes.accepted(token);\n",
            to: "                    let _: fn(&crate::wire::Nodes, u64) = crate::wire::Nodes::accepted;\n",
        }],
        test: "quorum::tokens::quorum_first_proposal_exceeds_the_accepted_token",
    },
    TestMutant {
        name: "lost-lease-stays-on-a-minority",
        edits: &[Edit {
            file: "src/lease/renewal.rs",
            from: "if how == LeaseEnd::Lost || !self.nodes.deployment.decides_alone() {",
            to: "if how == LeaseEnd::Lost {",
        }],
        test: "quorum::leases::quorum_lease_is_lost_after_a_majority_lost_it",
    },
    TestMutant {
        name: "repaired-node-forgotten-without-majority",
        edits: &[Edit {
            file: "src/lease/renewal.rs",
            from: "let without_since = without_before.union(without);",
            to: "let without_since = without_before.without(without_before).union(without);",
        }],
        test: "quorum::lost_leases::quorum_lease_does_not_pass_from_node_to_node",
    },
    TestMutant {
        name: "rejoin-waits-for-ttl-only",
        edits: &[Edit {
            file: "src/locks/rejoin.rs",
            from: "self.options.longest_ttl().max(",
            to: "self.options.ttl.max(",
        }],
        test: "quorum::rejoin::quorum_founding_waits_for_leases_of_either_side",
    },
    TestMutant {
        name: "rejoin-polls-once",
        edits: &[Edit {
            file: "src/locks/rejoin.rs",
            from: "if known(&after) <= longest {",
            to: "if known(&after) <= Duration::MAX {",
        }],
        test: "quorum::rejoin::quorum_rejoin_waits_for_a_longer_lease_granted_meanwhile",
    },
    TestMutant {
        name: "write-ttl-unchecked",
        edits: &[Edit {
            file: "src/options/check.rs",
            from: "            (\"write_ttl\", write_ttl, shortest, longest),\n",
            to: "",
        }],
        test: "options::options_out_of_bounds_are_refused_before_connecting",
    },
    TestMutant {
        name: "max-hold-compared-with-ttl-only",
        edits: &[Edit {
            file: "src/options/check.rs",
            from: "            (\"write_ttl\", write_ttl, max_hold),\n",
            to: "",
        }],
        test: "options::options_out_of_bounds_are_refused_before_connecting",
    },
    TestMutant {
        name: "no-readers-allowed",
        edits: &[Edit {
            file: "src/options/check.rs",
            from: "if self.max_readers == 0 {",
            to: "if self.max_readers == u32::MAX {",
        }],
        test: "options::options_out_of_bounds_are_refused_before_connecting",
    },
    TestMutant {
        name: "inspection-shows-the-longest-ttl",
        edits: &[Edit {
            file: "src/inspection.rs",
            from: "seen[majority - 1].remaining",
            to: "seen[0].remaining",
        }],
        test: "quorum::inspection::quorum_inspect_reports_holds_of_a_majority",
    },
    TestMutant {
        name: "inspection-shows-the-most-holds",
        edits: &[Edit { file: "src/inspection.rs", from: "seen[majority - 1].count", to: "seen[0].count" }],
        test: "quorum::inspection::quorum_inspect_reports_holds_of_a_majority",
    },
    TestMutant {
        name: "inspection-shows-the-most-readers",
        edits: &[Edit { file: "src/inspection.rs", from: "counts.get(majority - 1)", to: "counts.first()" }],
        test: "quorum::inspection::quorum_inspect_counts_readers_of_a_majority",
    },
    TestMutant {
        name: "queue-entry-left-on-a-minority",
        edits: &[Edit {
            file: "src/lease/attempt_guard.rs",
            from: "if self.is_unanimous && !self.attempt.in_flight.is_indeterminate() {",
            to: "if !self.attempt.in_flight.is_indeterminate() {",
        }],
        test: "quorum::queue::quorum_release_leaves_the_queue_of_a_node_that_did_not_grant",
    },
    TestMutant {
        name: "lease-lost-late-not-released",
        edits: &[Edit {
            file: "src/lease/renewal.rs",
            from: "if how == LeaseEnd::Lost || !self.nodes.deployment.decides_alone() {",
            to: "if how != LeaseEnd::Lost && !self.nodes.deployment.decides_alone() {",
        }],
        test: "suite::mutex_standalone_push_resp2::lost_lease_is_released_once_replies_arrive",
    },
    TestMutant {
        name: "upgrade-queued-last",
        edits: &[Edit { file: "lua/rwlock.lua", from: "      place = 0\n", to: "" }],
        test: "scripts::vectors::vectors_get_their_answers",
    },
    TestMutant {
        name: "upgrade-keeps-its-earlier-place",
        edits: &[Edit {
            file: "lua/rwlock.lua",
            from: "  local is_added = (not is_queued or place == 0)\n    and redis.call('ZADD', lock.queue, place == 0 and 'CH' or 'NX',",
            to: "  local is_added = not is_queued\n    and redis.call('ZADD', lock.queue, 'NX',",
        }],
        test: "scripts::vectors::vectors_get_their_answers",
    },
    TestMutant {
        name: "another-writer-admits-readers",
        edits: &[Edit {
            file: "lua/rwlock.lua",
            from: "      math.max(ends, lock.wait_until), unpack(upgrade))",
            to: "      ends, unpack(upgrade))",
        }],
        test: "scripts::vectors::vectors_get_their_answers",
    },
    TestMutant {
        name: "rest-of-readers-not-notified",
        edits: &[Edit {
            file: "lua/rwlock.lua",
            from: "    if is_admitted and #entries == 2 * size then notify_rest(lock, latest) end\n",
            to: "",
        }],
        test: "scripts::rwlock::readers_beyond_one_batch_are_admitted_batch_by_batch",
    },
    TestMutant {
        name: "broken-subscriptions-noticed-by-heartbeat",
        edits: &[Edit {
            file: "src/wire/subscriber.rs",
            from: "                () = self.disconnected.notified() => return,\n",
            to: "                () = self.disconnected.notified() => {}\n",
        }],
        test: "suite::mutex_quorum3_push_resp3::waiter_is_notified_after_its_subscription_broke",
    },
    TestMutant {
        name: "minority-grants-not-released",
        edits: &[
            Edit {
                file: "src/lease/attempt_guard.rs",
                from: "    pub(super) fn abandon(&mut self) {\n        self.attempt.in_flight.mark_unknown();",
                to: "    pub(super) fn abandon(&mut self) {\n        self.leak();",
            },
            Edit {
                file: "src/lease/attempt_guard.rs",
                from: "        self.client.nodes.ask(&call, by, &in_flight, WaitFor::All).await;",
                to: "        let _: (_, _, &Arc<crate::wire::InFlight>) = (call, by, &in_flight);",
            },
        ],
        test: "quorum::contention::quorum_try_ends_soon_if_a_minority_lost_the_lock",
    },
    TestMutant {
        name: "force-on-a-quorum-grants-to-none",
        edits: &[MUTEX_FORCE_WITHOUT_GRANT],
        test: "suite::mutex_quorum3_push_resp3::force_release_revokes_and_grants_to_waiter",
    },
];
