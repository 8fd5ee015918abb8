//! Mistakes in how long leases, holds and queues last, and in what a client learns of losses, that
//! a named test must find. Each of them was once found by none.

use super::TestMutant;
use super::client_test_mutants::edit;

pub const LEASE_TEST_MUTANTS: &[TestMutant] = &[
    TestMutant {
        name: "slots-not-learned-after-a-failure",
        edits: &[edit(
            "src/wire/servers/slot_learning.rs",
            "let _ = timeout(this.limit(), this.learn(without.as_deref())).await;",
            "if !matches!(timeout(this.limit(), this.learn(without.as_deref())).await, Ok(Ok(()))) { return; }",
        )],
        test: "cluster::failover::cluster_failover_is_followed_after_the_slots_could_not_be_learned",
    },
    TestMutant {
        name: "lease-counts-from-the-last-request",
        edits: &[edit("src/lease/reply_tally.rs", "sent.min(reply.sent)", "sent.max(reply.sent)")],
        test: "quorum::late_requests::quorum_lease_counts_from_the_first_request",
    },
    TestMutant {
        name: "losses-kept-after-a-majority-confirmed",
        edits: &[edit("src/lease/renewal.rs", "kept.without = NodeSet::default();", "")],
        test: "quorum::lost_leases::quorum_lease_survives_a_loss_after_a_majority_confirmed_it",
    },
    TestMutant {
        name: "downgraded-lease-outlasts-the-old-hold",
        edits: &[edit("src/lease/owned_lease.rs", "until = until.min(trusted_until);", "")],
        test: "quorum::lost_leases::quorum_downgraded_lease_ends_with_the_old_hold_of_a_silent_node",
    },
    TestMutant {
        name: "undone-attempts-still-counted",
        edits: &[edit(
            "src/lease/schedule.rs",
            "self.leaseless -= batch.releases.iter().filter(|pending| !pending.abandoned.has_lease).count();",
            "",
        )],
        test: "standalone::dropped_guards::a_dropped_call_is_undone_however_many_were_before",
    },
    TestMutant {
        name: "siblings-not-asked-after-a-renewal-by-hand",
        edits: &[edit(
            "src/lease/manual_renewal.rs",
            "keeper.schedule().expedite_siblings(std::slice::from_ref(lease));",
            "",
        )],
        test: "rwlock::expiry::rwlock_standalone_renewal_by_hand_finds_losses_of_both_sides",
    },
    TestMutant {
        name: "adoption-shortens-other-holds",
        edits: &[edit(
            "lua/reentrant.lua",
            "if redis.call('PTTL', lock) < call.ttl_ms + 0 then redis.call('PEXPIRE', lock, call.ttl_ms) end",
            "redis.call('PEXPIRE', lock, call.ttl_ms)",
        )],
        test: "scripts::vectors::vectors_get_their_answers",
    },
    TestMutant {
        name: "adopted-hold-outlasts-its-key",
        edits: &[edit(
            "lua/rwlock.lua",
            "  if lock.pttl < call.ttl_ms + 0 then redis.call('PEXPIRE', lock.key, call.ttl_ms) end\n",
            "",
        )],
        test: "scripts::vectors::vectors_get_their_answers",
    },
    TestMutant {
        name: "queue-not-kept-by-its-waiters",
        edits: &[edit(
            "lua/rwlock.lua",
            "    redis.call('ZADD', lock.queue, unpack(marks))\n    redis.call('PEXPIRE', lock.queue, '60000')\n",
            "    redis.call('ZADD', lock.queue, unpack(marks))\n",
        )],
        test: "scripts::vectors::vectors_get_their_answers",
    },
    TestMutant {
        name: "repeated-release-is-not-final",
        edits: &[edit(
            "src/lease/renewal.rs",
            "pending.abandoned.is_final |= failure.is_indeterminate();",
            "let _ = &failure;",
        )],
        test: "standalone::dropped_guards::a_release_that_was_sent_twice_refuses_a_late_acquire",
    },
    TestMutant {
        name: "lost-hold-is-joined",
        edits: &[edit("src/lease/joint_hold.rs", "            && !group.lease.is_lost()\n", "")],
        test: "rwlock::expiry::rwlock_standalone_reader_does_not_join_a_lost_hold",
    },
    TestMutant {
        name: "no-early-repair",
        edits: &[edit("src/lease/keeper.rs", "pause.min(FIRST_REPAIR)", "pause")],
        test: "quorum::refusals::quorum_lease_is_soon_repaired_on_a_node_that_refused_its_token",
    },
    TestMutant {
        name: "late-failure-drops-the-new-connection",
        edits: &[edit(
            "src/wire/shared_connection.rs",
            "pair.shared.generation == generation",
            "pair.shared.generation >= generation",
        )],
        test: "standalone::reconnections::a_late_failure_of_a_former_connection_keeps_the_new_one",
    },
    TestMutant {
        name: "passed-hold-is-not-asked-about",
        edits: &[edit(
            "src/lease/keeper.rs",
            "let sent = lease.attempt().confirmed();",
            "let sent = lease.counts_from();",
        )],
        test: "standalone::reconnections::a_hold_that_was_lost_on_its_way_to_the_next_task_is_asked_about",
    },
    TestMutant {
        name: "late-grant-is-not-asked-about",
        edits: &[edit("src/lease/keeper.rs", "lease.counts_from());", "Moment::now());")],
        test: "standalone::reconnections::a_grant_that_is_learned_late_is_asked_about",
    },
    TestMutant {
        name: "end-of-a-joint-lease-is-not-announced",
        edits: &[edit("src/lease/joint_hold.rs", "        self.lease.announce();\n", "")],
        test: "suite::read_standalone_push_resp3::tasks_read_under_one_hold_without_a_request",
    },
    TestMutant {
        name: "outer-hold-lasts-as-long-as-an-undone-one",
        edits: &[edit("lua/reentrant.lua", "  redis.pcall('PEXPIRE', lock, hold.pttl)\n", "")],
        test: "scripts::half_refused::refused_command_for_one_of_all_locks_leaves_an_outer_hold_as_it_was",
    },
    TestMutant {
        name: "outage-limit-counts-from-the-front",
        edits: &[edit(
            "src/lease/progress.rs",
            "*begun.get_or_insert_with(Moment::now)",
            "*begun.insert(Moment::now())",
        )],
        test: "standalone::time_limits::an_outage_limit_counts_from_the_beginning_of_the_call",
    },
    TestMutant {
        name: "hung-node-is-waited-for-by-two",
        edits: &[edit("src/wire/asking.rs", " && (!may_grant || least == 0) {", " && !may_grant {")],
        test: "quorum::slow_nodes::quorum_two_clients_progress_while_one_of_three_nodes_hangs",
    },
    TestMutant {
        name: "reader-waits-for-a-hung-node",
        edits: &[edit("src/lease/joint_hold.rs", "if !client.nodes.is_failing(&attempt.name) {", "{")],
        test: "quorum::slow_nodes::quorum_release_of_a_reader_does_not_wait_for_a_node_that_hangs",
    },
    TestMutant {
        name: "outdated-sentinel-is-believed-alone",
        edits: &[edit(
            "src/wire/servers/sentinel.rs",
            "reports.len() <= self.sentinels.len() / 2",
            "reports.is_empty()",
        )],
        test: "sentinel::two_masters::sentinel_client_waits_until_a_later_sentinel_answers",
    },
    TestMutant {
        name: "outdated-sentinel-is-not-waited-out",
        edits: &[edit(
            "src/wire/servers/sentinel.rs",
            "limit = if one.epoch < known { limit } else { REPORT_GATHERING };",
            "limit = REPORT_GATHERING;",
        )],
        test: "sentinel::two_masters::sentinel_client_does_not_go_back_to_an_old_master",
    },
    TestMutant {
        name: "returned-master-is-known",
        edits: &[edit(
            "src/wire/servers/slot_learning.rs",
            "table.masters.contains_key(address));",
            "!address.is_empty());",
        )],
        test: "cluster::replaced::cluster_lease_that_a_returned_master_misses_is_asked_about",
    },
    TestMutant {
        name: "late-failure-is-of-the-new-master",
        edits: &[edit(
            "src/wire/outage.rs",
            "                && knew(&shard)\n",
            "                && (knew(&shard) || true)\n",
        )],
        test: "cluster::replaced::cluster_late_failure_of_a_replaced_master_begins_no_outage",
    },
    TestMutant {
        name: "masterdown-keeps-the-connection",
        edits: &[edit("src/wire/error_replies.rs", " || says(error, \"MASTERDOWN\")", "")],
        test: "standalone::reconnections::connection_to_a_replica_without_its_master_is_given_up",
    },
];
