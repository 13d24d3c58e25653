/*
 * Copyright (c) 2026 The FlowBundler authors.
 *
 * Licensed under the Apache License, Version 2.0 (the "License");
 * you may not use this file except in compliance with the License.
 * You may obtain a copy of the License at:
 *
 *     http://www.apache.org/licenses/LICENSE-2.0
 *
 * Unless required by applicable law or agreed to in writing, software
 * distributed under the License is distributed on an "AS IS" BASIS,
 * WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
 * See the License for the specific language governing permissions and
 * limitations under the License.
 */

/* Gives the product's wheel other names, so that it is in one program with
 * "peers.c", which has the wheel's own names for something else. */

#define mltw real_mltw
#define mltw_config_error real_mltw_config_error
#define mltw_config_equal real_mltw_config_equal
#define mltw_create real_mltw_create
#define mltw_destroy real_mltw_destroy
#define mltw_enqueue real_mltw_enqueue
#define mltw_dequeue real_mltw_dequeue
#define mltw_next_due real_mltw_next_due
#define mltw_flush real_mltw_flush
#define mltw_count real_mltw_count
#define mltw_memory_bytes real_mltw_memory_bytes
#define mltw_disable_few__ real_mltw_disable_few__
#define mltw_get_stats real_mltw_get_stats
