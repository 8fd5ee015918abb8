//! Mistakes that were made once: of the scripts with missing rights and late requests, and of the
//! client when a connection breaks or a task waits for itself.

use super::TestMutant;
use super::client_test_mutants::edit;

pub const FINDING_MUTANTS: &[TestMutant] = &[
    TestMutant {
        name: "new-connection-asks-nothing",
        edits: &[edit("src/lease/new_connection.rs", "            self.notice_connection(place);\n", "")],
        test: "suite::mutex_standalone_push_resp2::losses_are_known_once_the_client_is_connected_again",
    },
    TestMutant {
        name: "never-renewed-leases-not-asked-about",
        edits: &[edit(
            "src/lease/kept_leases.rs",
            "        self.due = mem::take(&mut self.due).into_iter().map(|(_, place)| (now, place)).collect();
        self.all.iter_mut().for_each(|(_, kept)| kept.due = kept.due.and(Some(now)));\n",
            "        let kept = self.all.iter().map(|(_, kept)| kept).filter(|kept| kept.due.is_some());
        let renewed = kept.filter(|kept| kept.lease.options().renewal == Renewal::Automatic);
        let leases: Vec<Lease> = renewed.map(|kept| kept.lease.clone()).collect();
        leases.iter().for_each(|lease| _ = self.make_due(lease, Some(now)));\n",
        )],
        test: "suite::mutex_cluster_push_resp2::losses_are_known_once_the_client_is_connected_again",
    },
    TestMutant {
        name: "reply-of-any-master-ends-an-outage",
        edits: &[edit(
            "src/wire/outage.rs",
            "(shard == of || *of == Shard::All) && shown >= ability",
            "shown >= ability",
        )],
        test: "outages::a_master_that_answers_ends_no_outage_of_another_one",
    },
    TestMutant {
        name: "release-ends-the-outage-of-a-full-server",
        edits: &[edit(
            "src/wire/outage.rs",
            "(\"renew\" | \"release\" | \"downgrade\", None) => Ability::Write,\n",
            "",
        )],
        test: "outages::what_a_full_server_still_does_ends_no_outage",
    },
    TestMutant {
        name: "busy-lock-ends-an-outage-of-writes",
        edits: &[edit(
            "src/wire/outage.rs",
            "_ if !is_done => Ability::Reply,",
            "_ if !is_done => Ability::Write,",
        )],
        test: "outages::a_busy_lock_ends_no_outage_of_writes",
    },
    TestMutant {
        name: "release-ends-an-outage-of-replicas",
        edits: &[edit("src/wire/failure.rs", "Some(Ability::Replicate(*required))", "Some(Ability::Write)")],
        test: "outages::what_needs_no_replica_ends_no_outage_of_replicas",
    },
    TestMutant {
        name: "grant-without-a-token-ends-no-outage",
        edits: &[edit(
            "src/wire/outage.rs",
            "i64::from(!matches!(call.verb(), \"acquire\" | \"read\" | \"write\"))",
            "1",
        )],
        test: "outages::every_grant_ends_an_outage",
    },
    TestMutant {
        name: "one-master-that-fails-stops-all-turns",
        edits: &[edit(
            "src/wire/outage.rs",
            "(*of == shard || *of == Shard::All)",
            "(*of == shard || *of != shard)",
        )],
        test: "outages::a_master_that_answers_ends_no_outage_of_another_one",
    },
    TestMutant {
        name: "late-request-begins-an-outage",
        edits: &[edit("src/wire/node.rs", "Failure::new(Cause::Late, false)", "Failure::unsent(too_slow())")],
        test: "outages::a_request_that_comes_too_late_begins_no_outage",
    },
    TestMutant {
        name: "cluster-call-fails-before-the-slots-are-asked-for",
        edits: &[edit("src/wire/node.rs", "tries >= CLUSTER_TRIES && has_asked ||", "tries >= CLUSTER_TRIES ||")],
        test: "cluster::replaced::cluster_call_waits_for_the_slots_to_be_learned",
    },
    TestMutant {
        name: "renewal-waits-for-a-whole-lease",
        edits: &[edit("src/lease/schedule.rs", "    lease.span() / 4\n", "    lease.span()\n")],
        test: "lease::renewal::short_lease_outlives_a_silent_connection_beside_a_long_one",
    },
    TestMutant {
        name: "one-short-lease-hurries-all",
        edits: &[edit("src/lease/schedule.rs", "size(patience(&lease))", "size(longest)")],
        test: "lease::renewal::long_lease_outlives_slow_replies_beside_short_ones",
    },
    TestMutant {
        name: "claims-are-renewed-as-seldom-as-leases",
        edits: &[edit(
            "src/lease/renewal.rs",
            "let pause = (lease.span() / 30)",
            "let pause = (lease.options().ttl / 30)",
        )],
        test: "lease::renewal::a_claim_outlives_a_stall_that_a_lease_of_its_length_does",
    },
    TestMutant {
        name: "waiting-for-itself-is-silent",
        edits: &[edit(
            "src/lease/lock_request.rs",
            "        if cfg!(feature = \"tracing\") && self.client.is_held_by_caller(&self.name) {\n            event!",
            "        if self.client.is_held_by_caller(&self.name) && self.owner.is_some() {\n            event!",
        )],
        test: "logs::a_task_that_waits_for_itself_is_warned_once",
    },
    TestMutant {
        name: "stalled-process-is-no-reason",
        edits: &[edit("src/lease/lease_report.rs", "=> LossReason::Stalled,", "=> LossReason::NotRenewed,")],
        test: "logs::a_process_that_did_not_run_is_the_reason_of_a_loss",
    },
    TestMutant {
        name: "late-renewal-shortens-a-lease",
        edits: &[edit(
            "lua/mutex.lua",
            "      and (pttl >= ttl_ms + 0 or redis.pcall('PEXPIRE', KEYS[i], ttl_ms) == 1) then\n",
            "      and redis.pcall('PEXPIRE', KEYS[i], ttl_ms) == 1 then\n",
        )],
        test: "scripts::vectors::vectors_get_their_answers",
    },
    TestMutant {
        name: "refused-renewal-ends-the-call",
        edits: &[edit(
            "lua/mutex.lua",
            "or redis.pcall('PEXPIRE', KEYS[i], ttl_ms) == 1)",
            "or redis.call('PEXPIRE', KEYS[i], ttl_ms) == 1)",
        )],
        test: "scripts::half_refused::refused_renewal_is_the_answer_of_its_lock",
    },
    TestMutant {
        name: "refused-lock-keeps-its-proposal",
        edits: &[edit(
            "lua/mutex.lua",
            "      if accepted and not token then redis.call('SET', fence, accepted, 'PX', token_ttl_ms) end\n",
            "",
        )],
        test: "scripts::missing_rights::refused_lock_takes_its_proposal_back",
    },
    TestMutant {
        name: "counter-goes-back-with-a-release-that-fails",
        edits: &[edit(
            "lua/mutex.lua",
            "if spare > 0 then redis.pcall('INCRBY', fence, spare) end",
            "if spare < 0 then redis.pcall('INCRBY', fence, spare) end",
        )],
        test: "scripts::missing_rights::refused_command_leaves_no_key_without_ttl_and_no_grant",
    },
    TestMutant {
        name: "next-writer-lets-readers-in-after-all-expired",
        edits: &[edit(
            "lua/rwlock.lua",
            ", 'writer_wait_until', math.max(ends, lock.wait_until))\n      pcall(end_waiting",
            ")\n      pcall(end_waiting",
        )],
        test: "scripts::vectors::vectors_get_their_answers",
    },
    TestMutant {
        name: "release-that-passed-the-lock-on-is-an-error",
        edits: &[edit(
            "lua/reentrant.lua",
            "if not ok and redis.call('HEXISTS', lock, hold) == 1 then",
            "if not ok then",
        )],
        test: "scripts::half_refused::release_that_passed_the_lock_on_is_no_error",
    },
    TestMutant {
        name: "key-deleted-while-its-slot-moves-is-a-lasting-error",
        edits: &[edit(
            "lua/mutex.lua",
            "then return 'TRYAGAIN its slot moves' end",
            "then return 'ERR its slot moves' end",
        )],
        test: "cluster::slots::cluster_lock_that_a_call_deletes_while_its_slot_moves_is_no_lasting_error",
    },
    TestMutant {
        name: "former-writer-renews-by-its-name",
        edits: &[edit(
            "lua/rwlock.lua",
            "if writer ~= lock.owner or not has(attempts, lock.attempt) then return 0 end",
            "if writer ~= lock.owner or not has(words, lock.attempt) then return 0 end",
        )],
        test: "scripts::vectors::vectors_get_their_answers",
    },
    TestMutant {
        name: "nested-hold-gives-back-the-outer-ones-tokens",
        edits: &[edit(
            "lua/reentrant.lua",
            "elseif last_token ~= '' and (last_token ~= '0' or owner == attempt) then",
            "elseif last_token ~= '' then",
        )],
        test: "scripts::vectors::vectors_get_their_answers",
    },
    TestMutant {
        name: "full-server-frees-a-lock-that-was-waited-for",
        edits: &[edit("lua/mutex.lua", "if type(why) ~= 'table' or", "if true or")],
        test: "scripts::full_server::lock_is_handed_over_on_full_server",
    },
    TestMutant {
        name: "poll-without-a-right-loses-its-place",
        edits: &[edit(
            "lua/rwlock.lua",
            "      if is_new then redis.call('ZREM', lock.queue, lock.entry, 'seen ' .. lock.attempt) end\n      \
             error(stored)",
            "      redis.call('ZREM', lock.queue, lock.entry, 'seen ' .. lock.attempt)\n      error(stored)",
        )],
        test: "scripts::missing_rights::refused_command_leaves_no_key_without_ttl_and_no_grant",
    },
    TestMutant {
        name: "reader-that-is-kept-twice-counts-twice",
        edits: &[edit("lua/rwlock.lua", "if earlier then readers =", "if false then readers =")],
        test: "scripts::vectors::vectors_get_their_answers",
    },
    TestMutant {
        name: "end-of-a-release-wakes-under-the-lock",
        edits: &[edit(
            "src/lease/renewal.rs",
            "        drop(schedule);\n        if ended.is_some() || given_up.is_some() {\n            \
             self.settled.notify_waiters(); // not under the lock: it runs wakers\n        }\n",
            "        if ended.is_some() || given_up.is_some() {\n            \
             self.settled.notify_waiters();\n        }\n        drop(schedule);\n",
        )],
        test: "lease::wakers::the_end_of_a_release_wakes_tasks_outside_of_all_locks",
    },
    TestMutant {
        name: "renewal-wakes-under-the-lock",
        edits: &[edit(
            "src/lease/renewal.rs",
            "                        drop(schedule);\n                        lease.wake_waiters();\n",
            "                        lease.wake_waiters();\n                        drop(schedule);\n",
        )],
        test: "lease::wakers::a_renewal_wakes_tasks_outside_of_all_locks",
    },
    TestMutant {
        name: "hold-passed-although-it-was-revoked-on-its-way",
        edits: &[edit(
            "src/lease/owned_lease.rs",
            "request.client.local_queues.may_be_revoked(&request.name, self.lease.counts_from())",
            "request.client.keeper.has_ended()",
        )],
        test: "standalone::revoked_turns::a_hold_that_is_revoked_before_its_task_runs_is_not_passed_on",
    },
    TestMutant {
        name: "hold-joined-although-it-was-revoked-on-its-way",
        edits: &[edit(
            "src/lease/joint_hold.rs",
            "group.client.joint_queues.may_be_revoked(group.lease.name(), group.lease.counts_from())",
            "group.client.keeper.has_ended()",
        )],
        test: "standalone::revoked_turns::a_hold_that_is_revoked_before_its_task_runs_is_not_joined",
    },
    TestMutant {
        name: "converted-hold-forgets-its-place",
        edits: &[edit("src/lease/attempt.rs", "reserved: self.reserved.clone(),", "reserved: None,")],
        test: "quorum::queue::quorum_writer_that_reads_now_leaves_the_queue_of_a_node",
    },
    TestMutant {
        name: "downgraded-hold-keeps-what-it-reserved",
        edits: &[edit(
            "lua/rwlock.lua",
            "    end_hold(lock, 'write', writes, call)\n    give_back_spare(lock, writes, call)\n",
            "    end_hold(lock, 'write', writes, call)\n",
        )],
        test: "standalone::reserved_tokens::the_lost_release_of_a_converted_hold_has_released_it",
    },
    TestMutant {
        name: "adopted-hold-forgets-what-was-reserved",
        edits: &[edit("src/lease/acquire.rs", "1 + ticket.spare_tokens", "1")],
        test: "standalone::reserved_tokens::the_next_attempt_gives_back_what_the_former_has_reserved",
    },
    TestMutant {
        name: "dropped-adoption-takes-a-used-token-back",
        edits: &[edit("src/lease/acquire.rs", "attempt.note_token(ticket.fencing_token());", "")],
        test: "standalone::reserved_tokens::a_dropped_adoption_takes_no_used_token_back",
    },
    TestMutant {
        name: "ticket-without-a-token-names-spare-ones",
        edits: &[edit(
            "src/lease/hold.rs",
            "lease.fencing_token().map_or(0, spare)",
            "attempt.spare_tokens().max(0 * lease.fencing_token().map_or(0, spare))",
        )],
        test: "standalone::reserved_tokens::a_ticket_without_a_token_crosses_processes",
    },
    TestMutant {
        name: "dead-waiters-keep-their-tokens",
        edits: &[edit(
            "lua/mutex.lua",
            "if reserved > 0 then redis.pcall('DECRBY', fence, reserved) end",
            "",
        )],
        test: "scripts::vectors::vectors_get_their_answers",
    },
    TestMutant {
        name: "lease-that-was-granted-again-stays-held",
        edits: &[edit(
            "src/lease/new_connection.rs",
            "let is_comparable = may_return\n",
            "let is_comparable = false && may_return\n",
        )],
        test: "standalone::restored_queue::a_lease_that_was_lost_and_granted_again_is_lost",
    },
    TestMutant {
        name: "hold-that-is-doubtful-is-released-without-a-look",
        edits: &[edit(
            "src/lease/owned_lease.rs",
            "self.guard.client.keeper.confirm(&self.lease).await.err()",
            "None::<Failure>",
        )],
        test: "standalone::restored_queue::one_that_is_released_meanwhile_was_lost",
    },
    TestMutant {
        name: "new-connection-is-noticed-twice-a-second",
        edits: &[edit("src/lease/new_connection.rs", "            self.notice_connection(0);\n", "")],
        test: "standalone::restored_queue::one_that_is_released_on_a_new_connection_was_lost",
    },
    TestMutant {
        name: "holder-deleted-before-it-is-replaced",
        edits: &[edit(
            "lua/reentrant.lua",
            "  local reply = redis.pcall('HSET', lock, 'mode', mode, owner, '1', hold, '1')\n  if",
            "  redis.call('DEL', lock)\n  local reply = redis.pcall('HSET', lock, 'mode', mode, owner, '1', hold, '1')\n  if",
        )],
        test: "cluster::slots::cluster_release_grants_to_the_waiter_while_its_slot_moves",
    },
    TestMutant {
        name: "doctor-does-not-try-to-renew",
        edits: &[edit("src/wire/rights.lua", "may('pexpire', key, '1000')\n", "")],
        test: "locks::doctor::doctor_names_each_right_that_is_missing",
    },
    TestMutant {
        name: "right-not-named-for-a-lock-of-a-cluster",
        edits: &[edit(
            "src/wire/servers/slot_table.rs",
            "        b\"EVAL\" => words.nth(2).map(Slot::for_key),\n",
            "",
        )],
        test: "rights::rights_that_a_cluster_refuses_are_named",
    },
    TestMutant {
        name: "key-that-is-refused-taken-for-a-command",
        edits: &[edit(
            "src/wire/node.rs",
            "is_forbidden(&error) && !names_key(&error)",
            "is_forbidden(&error)",
        )],
        test: "locks::doctor::doctor_takes_no_key_for_a_command",
    },
    TestMutant {
        name: "right-to-write-is-asked-for-a-read",
        edits: &[edit("src/wire/rights.lua", "if ARGV[1] == '1' then return missing end\n", "")],
        test: "rights::rights_to_read_are_named_without_a_right_to_write",
    },
    TestMutant {
        name: "refused-ping-ends-the-subscription",
        edits: &[edit(
            "src/wire/servers/endpoint.rs",
            "is_error_reply(&error) && !is_unserved(&error)",
            "false && is_error_reply(&error) && !is_unserved(&error)",
        )],
        test: "rights::subscription_outlives_the_lack_of_the_right_to_test_it",
    },
    TestMutant {
        name: "subscription-stays-on-a-removed-node",
        edits: &[edit(
            "src/wire/servers/endpoint.rs",
            "is_error_reply(&error) && !is_unserved(&error)",
            "is_error_reply(&error) || is_unserved(&error)",
        )],
        test: "cluster::nodes::cluster_subscription_leaves_a_node_that_was_removed",
    },
    TestMutant {
        name: "refused-repair-is-never-answered",
        edits: &[edit("src/lease/renewal.rs", "            in_flight.answered();\n", "")],
        test: "quorum::lost_leases::quorum_repair_that_a_node_refuses_leaves_no_mark",
    },
    TestMutant {
        name: "proposal-from-one-clock",
        edits: &[edit(
            "src/wire/nodes.rs",
            "{ Ok(()) } else { Err(Failure::no_majority(replies)) }",
            "{ Ok(()) } else { Ok(drop(replies)) }",
        )],
        test: "quorum::tokens::quorum_first_token_is_none_of_a_client_that_knows_one_clock",
    },
    TestMutant {
        name: "wait-for-replicas-has-one-limit",
        edits: &[edit("src/wire/node.rs", "connection.query_in_turn(&wait", "connection.query(&wait")],
        test: "replicas::confirmation::replicas_standalone_many_calls_wait_in_turn",
    },
];
